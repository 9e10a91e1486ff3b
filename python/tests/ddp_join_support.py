# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of uneven inputs: models, batches, and reference steps in one process."""

from __future__ import annotations

from typing import Any

import torch
from ddp_models import Mlp
from ddp_support import gradients
from torch import nn

ROWS = 4


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.sin(
        torch.arange(ROWS * 6, dtype=torch.float32).view(ROWS, 6) + 10 * step + 3 * rank
    )


def make(seed: int = 0) -> Mlp:
    torch.manual_seed(seed)
    return Mlp()


def reference_step(
    reference: nn.Module, active: list[int], divide_by: int, steps: list[int], rate: float
) -> dict[str, Any]:
    """One synchronized step in float64 on the batches of the active ranks. Returns gradients by
    name."""
    reference.zero_grad()
    for rank in active:
        for step in steps:
            (reference(batch(rank, step).double()).square().sum() / divide_by).backward()
    result = gradients(reference)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= rate * parameter.grad
    return result


class Counter(nn.Module):
    """Its buffer counts the rank's data, and the loss depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x.sum()
        return x * self.scale + self.seen
