# SPDX-License-Identifier: BSD-3-Clause
"""Models and the reference for tests of several wrappers at once."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from ddp_support import check_near, check_same_on_all_ranks, gradients
from torch import Tensor, nn


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=generator)


class Net(nn.Module):
    """Layers of equal size, so that swapped messages would fit. ``used`` selects some of them."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.collective = False

    def forward(self, x: Tensor, used: Any = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            if used is None or i in used:
                x = x + torch.tanh(layer(x))
            if self.collective:  # the user's own collective, in the middle of the module
                dist.all_reduce(torch.ones(6, 6))
        return x


def check_average(models: list[nn.Module], loss: Any, world: int, what: str) -> None:
    """Compare .grad with the gradients of ``loss(models, rank)``, computed for one rank at a
    time."""
    memo: dict[int, Any] = {}
    references = [copy.deepcopy(m, memo) for m in models]  # shared modules stay shared
    for reference in references:
        reference.collective = False
        reference.double()
        reference.zero_grad()
    for rank in range(world):
        (loss(references, rank) / world).backward()
    for i, (model, reference) in enumerate(zip(models, references, strict=True)):
        expected = gradients(reference)
        for name, grad in gradients(model).items():
            check_near(grad, expected[name], f"{what}: model {i}, {name}")
    check_same_on_all_ranks([p.grad for m in models for p in m.parameters()], what)
