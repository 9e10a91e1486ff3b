# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex.cmake_dir`` prints the prefix of the C++ package, for ``-Dapex_ROOT=...``."""

from pathlib import Path


def get_cmake_dir() -> Path:
    """The folder that contains ``lib/cmake/apex/apexConfig.cmake``."""
    from apex import _core

    return Path(_core.__file__).resolve().parent


if __name__ == "__main__":
    print(get_cmake_dir())
