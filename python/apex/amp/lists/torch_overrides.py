# SPDX-License-Identifier: BSD-3-Clause
"""Functions of ``torch`` at level O1. Lists may be changed before ``initialize``."""

import torch

from .defaults import lists_of

MODULE = torch
FP16_FUNCS, FP32_FUNCS, CASTS, SEQUENCE_CASTS = lists_of(MODULE)
BANNED_FUNCS: list[tuple[str, str]] = []
