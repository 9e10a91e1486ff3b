# SPDX-License-Identifier: BSD-3-Clause
"""Base classes by which ``amp.initialize`` recognizes objects that it must refuse.

Their subclasses are defined in packages that ``apex.amp`` cannot import.
"""


class DataParallelWrapper:
    """A wrapper. ``amp.initialize`` takes the module inside of it instead."""


class KeepsMasterWeights:
    """An optimizer that keeps its own master weights."""
