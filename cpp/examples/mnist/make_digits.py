# SPDX-License-Identifier: BSD-3-Clause
"""Write digits.bin: scikit-learn's 1,797 handwritten digits, for programs without Python.

One record of 65 bytes per image: 8x8 pixels of 0..16, row by row, then the digit. The first 1,437
records are to train on, the last 360, of which each digit has its share, to test on: the split of
examples/mnist/main.py. The images are E. Alpaydin and C. Kaynak, "Optical Recognition of
Handwritten Digits", UCI Machine Learning Repository, CC BY 4.0.

    python make_digits.py [digits.bin]
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def main(path: Path) -> None:
    pixels, digits = load_digits(return_X_y=True)
    kept, held_out = train_test_split(
        range(len(digits)), test_size=360, random_state=0, stratify=digits
    )
    records = np.concatenate([pixels, digits[:, None]], axis=1).astype(np.uint8)
    path.write_bytes(records[kept + held_out].tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("digits.bin"))
