# SPDX-License-Identifier: BSD-3-Clause
"""Functions of ``torch.nn.functional`` at level O1. Lists may be changed before ``initialize``."""

import torch

from .defaults import BANNED, lists_of

MODULE = torch.nn.functional
FP16_FUNCS, FP32_FUNCS, CASTS, SEQUENCE_CASTS = lists_of(MODULE)
BANNED_FUNCS: list[tuple[str, str]] = [BANNED]
