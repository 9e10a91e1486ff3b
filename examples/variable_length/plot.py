# SPDX-License-Identifier: BSD-3-Clause
"""Draws the losses that main.py wrote with ``--output``: ``python plot.py curves.png A.json ...``.

Each file is a curve, named after the file. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

WINDOW = 10  # steps of a moving average, because each step has other lines


def main(target: Path, files: list[Path]) -> None:
    figure, panel = pyplot.subplots(figsize=(7, 4))
    for number, file in enumerate(files):
        losses = json.loads(file.read_text())["losses"]
        means = [sum(losses[i : i + WINDOW]) / WINDOW for i in range(len(losses) - WINDOW + 1)]
        # Curves may coincide, so each is drawn thinner than the previous one.
        panel.plot(
            range(WINDOW, len(losses) + 1),
            means,
            label=file.stem.replace("_", " "),
            lw=max(1.0, 7.0 - 2.0 * number),
            ls="-" if number < 4 else "--",
        )
    panel.set_xlabel("step")
    panel.set_ylabel(f"loss per character, mean of {WINDOW} steps")
    panel.legend(fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
