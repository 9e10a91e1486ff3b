# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing overlaps, and outputs may be unknown. (Averages: ddp_programs.py.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ddp_models import build, data
from ddp_support import (
    RankPool,
    check_gradients,
    check_same_on_all_ranks,
    gradients,
    mean_over_ranks,
    to_reference,
    widen,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


class Blocks(nn.Module):
    """Four blocks behind a plain layer, checkpointed as ``how`` specifies (None: not at all)."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(4))
        )
        self.exit = nn.Linear(4, 2)
        self.how: str | None = None
        self.reentrant = False

    def run(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        if self.how is None:
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        h, run, blocks = self.entry(x), self.run, self.blocks
        if self.how == "sequential":
            h = checkpoint_sequential(blocks, 2, h, use_reentrant=self.reentrant)
        else:
            for block in blocks:
                h = run(block, h)
        return self.exit(h)


def _trains(rank: int, world: int, how: str | None, reentrant: bool) -> dict[str, int]:
    model = build(Blocks)
    model.how, model.reentrant = how, reentrant
    ddp = DistributedDataParallel(model, message_size=20)
    for step in range(4):
        locally = []
        for r in range(world):
            plain = to_reference(model)
            plain.how = None
            plain(widen(data(r, step))).square().mean().backward()
            locally.append(gradients(plain))
        ddp.zero_grad()
        # Reentrant checkpointing needs an input that requires a gradient.
        ddp(data(rank, step).requires_grad_()).square().mean().backward()
        check_gradients(ddp, mean_over_ranks(locally), f"{how}, step {step}", 1e-5)
        check_same_on_all_ranks([p.grad for p in ddp.parameters()], f"{how}, step {step}")
    return ddp.statistics()


@pytest.mark.parametrize("how", ["each", "sequential"])
def test_checkpointing_overlaps_as_much_as_without(ranks: RankPool, how: str) -> None:
    plain = ranks.run(2, _trains, None, False)[0]
    for reentrant in (False, True):
        with_it = ranks.run(2, _trains, how, reentrant)[0]
        assert with_it["launched_in_backward"] == plain["launched_in_backward"]
