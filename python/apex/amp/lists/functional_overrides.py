# SPDX-License-Identifier: BSD-3-Clause
"""Functions of ``torch.nn.functional`` at level O1. Lists may be changed before ``initialize``."""

import torch

from .defaults import (
    BANNED,
    FLOAT32,
    LOW_PRECISION,
    PROMOTE,
    PROMOTED_BY_TORCH,
    SEQUENCES_PROMOTED_BY_TORCH,
    existing,
)

MODULE = torch.nn.functional

#: Run in the low-precision dtype.
FP16_FUNCS = existing(LOW_PRECISION, MODULE)
#: Run in float32.
FP32_FUNCS = existing(FLOAT32, MODULE)
#: Promote to the widest dtype among their arguments.
CASTS = existing((*PROMOTE, *PROMOTED_BY_TORCH), MODULE)
SEQUENCE_CASTS = existing(SEQUENCES_PROMOTED_BY_TORCH, MODULE)
#: Refused with low-precision arguments: name and remedy.
BANNED_FUNCS = list(BANNED.items())
