# SPDX-License-Identifier: BSD-3-Clause
"""Training steps of a small model, and their average over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from ddp_models import Mlp
from ddp_support import check, gradients, to_reference


def make(seed: int = 0) -> Mlp:
    torch.manual_seed(seed)
    return Mlp()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.sin(torch.arange(24, dtype=torch.float32).view(4, 6) + 10 * step + 3 * rank)


def backward(ddp: torch.nn.Module, rank: int, step: int) -> None:
    ddp(batch(rank, step)).square().sum().backward()


def mean_gradients(model: torch.nn.Module, world: int, step: int) -> dict[str, Any]:
    reference = to_reference(model)
    for rank in range(world):
        (reference(batch(rank, step).double()).square().sum() / world).backward()
    return gradients(reference)


def raised(what: str, error: BaseException | None) -> None:
    check(error is not None, f"nothing was raised, expected: {what}")
    check(what in str(error), f"expected {what!r} in: {error}")
