# SPDX-License-Identifier: BSD-3-Clause
"""Functions of ``torch.Tensor`` at level O1. Lists may be changed before ``initialize``."""

import torch

from .defaults import lists_of

MODULE = torch.Tensor
FP16_FUNCS, FP32_FUNCS, CASTS, SEQUENCE_CASTS = lists_of(MODULE)
FP32_FUNCS.append("cpu")
BANNED_FUNCS: list[tuple[str, str]] = []
