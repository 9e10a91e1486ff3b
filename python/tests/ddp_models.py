# SPDX-License-Identifier: BSD-3-Clause
"""Small models, their batches and training steps, and averages over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ddp_support import gradients, to_reference
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 9)
        self.b = nn.Linear(9, 7)
        self.c = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.a.weight.dtype)
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


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


class Branches(nn.Module):
    """Three layers. The arguments of a forward select the layers that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for index in used:
            x = torch.tanh(self.layers[index](x)) + x
        return x


def data(rank: int, step: int = 0, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape or (3, 4), generator=generator)


def build(module: Callable[[], nn.Module] = Branches, seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return module()
