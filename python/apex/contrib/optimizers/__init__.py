# SPDX-License-Identifier: BSD-3-Clause
"""Apex's deprecated optimizers. :mod:`apex.optimizers` replaces them."""

from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD

__all__ = ["FusedAdam", "FusedLAMB", "FusedSGD"]
