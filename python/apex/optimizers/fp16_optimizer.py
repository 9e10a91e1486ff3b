# SPDX-License-Identifier: BSD-3-Clause
"""A module of early versions of Apex. Importing it raises an error that names the replacement."""

from ._unavailable import refuse

refuse("apex.optimizers", "FP16_Optimizer")
