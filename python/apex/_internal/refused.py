# SPDX-License-Identifier: BSD-3-Clause
"""Bases of what ``amp.initialize`` refuses, which are defined above ``apex.amp``."""


class DataParallelWrapper:
    """Holds the module that ``amp.initialize`` should have been given."""


class KeepsMasterWeights:
    """An optimizer with master weights of its own."""
