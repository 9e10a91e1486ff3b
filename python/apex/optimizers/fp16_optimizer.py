# SPDX-License-Identifier: BSD-3-Clause
"""A module of early versions of Apex; importing it says what to use."""

from ._unavailable import refuse

refuse("apex.optimizers", "FP16_Optimizer")
