# SPDX-License-Identifier: BSD-3-Clause
"""Imported by Python at its start. Without it, an editable installation precedes PYTHONPATH."""

import sys

sys.meta_path[:] = [
    finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"
]
