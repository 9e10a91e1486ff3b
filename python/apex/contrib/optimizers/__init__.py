# SPDX-License-Identifier: BSD-3-Clause
"""Apex's deprecated optimizers. :mod:`apex.optimizers` replaces them."""

from typing import Any

from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]


def __getattr__(name: str) -> Any:
    from apex.optimizers._unavailable import explain

    return explain(__name__, name)
