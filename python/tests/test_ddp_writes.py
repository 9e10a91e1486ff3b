# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that write parameters between backwards. Oracle: what is documented under "Ranks that are
out of step": only a difference that cannot be meant raises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_support import check, on_ranks, raises
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

Write = Callable[[nn.Parameter, float], Any]


def _sharpness(p: nn.Parameter, own: float) -> None:
    if p.grad is not None:
        p.add_(p.grad, alpha=0.01 * (1 + own))


def _spectral(p: nn.Parameter, own: float) -> None:
    if p.dim() == 2:
        p.div_(torch.linalg.matrix_norm(p, 2) * (1 + own))


# `own` is 0 where all ranks write the same.
WRITES: dict[str, Write] = {
    "sharpness-aware": _sharpness,
    "look-ahead": lambda p, own: p.lerp_(torch.ones_like(p), 0.5 + 0.1 * own),
    "moving average": lambda p, own: p.mul_(0.9 + 0.02 * own),
    "clipping": lambda p, own: p.clamp_(-0.1 * (1 + own), 0.1 * (1 + own)),
    "spectral norm": _spectral,
    "mask": lambda p, own: p.mul_((torch.arange(p.numel()).view_as(p) + int(own)) % 2),
    "manual SGD": lambda p, own: None if p.grad is None else p.sub_(p.grad, alpha=0.1 * (1 + own)),
    "initialization": lambda p, own: p.fill_(0.3 + own),
    "rounding": lambda p, own: p.copy_((p * 8 + own).round() / 8),
    "adapter": lambda p, own: p.copy_(torch.linspace(-1, 1 + own, p.numel()).view_as(p)),
    "through .data": lambda p, own: p.data.mul_(0.5 + own),
}


def _mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def _train(rank: int, write: Write, who: str, local: bool, undone: bool, steps: bool) -> None:
    """Six steps, with a write before the synchronized backward of each but the first two."""
    ddp = DistributedDataParallel(_mlp(), message_size=20)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def backward(step: int) -> None:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        ddp(x).square().mean().backward()

    for step in range(6):
        before: list[Tensor] = []
        if local:
            with ddp.no_sync():
                backward(step)
        if step >= 2 and (who != "one" or rank == 1):
            before = [p.detach().clone() for p in ddp.parameters()]
            with torch.no_grad():
                for p in ddp.parameters():
                    write(p, float(rank) if who == "each" else 0.0)
        ddp.zero_grad()
        backward(step)
        if undone:
            with torch.no_grad():
                for p, value in zip(ddp.parameters(), before, strict=False):
                    p.copy_(value)
        if steps:
            optimizer.step()


@pytest.mark.parametrize("local", [False, True], ids=["synchronized", "no_sync"])
@pytest.mark.parametrize("who", ["all", "each", "one"])
@on_ranks(2, timeout_s=120)
def test_writes_between_backwards_raise_only_where_they_cannot_be_meant(
    rank: int, world: int, who: str, local: bool
) -> None:
    for name, write in WRITES.items():
        for undone in (True, False):
            for steps in (True, False):
                expected: Any = contextlib.nullcontext()
                if who == "one" and not local and not steps:  # with steps: the replica check
                    expected = raises(RuntimeError, "rank 1 updated the parameters since")
                try:
                    with expected:
                        _train(rank, write, who, local, undone, steps)
                except (RuntimeError, AssertionError) as error:
                    check(False, f"{name}, undone {undone}, optimizer {steps}: {error}")
