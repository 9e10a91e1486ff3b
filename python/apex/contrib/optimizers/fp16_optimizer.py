# SPDX-License-Identifier: BSD-3-Clause
"""A module of early versions of Apex; importing it says what to use."""

from apex.optimizers._unavailable import refuse

refuse("apex.contrib.optimizers", "FP16_Optimizer")
