# SPDX-License-Identifier: BSD-3-Clause
"""Activation checkpointing, reentrant and not, inside DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from ddp_models import build, data
from ddp_support import (
    RankPool,
    check_equal,
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

OPTIONS = pytest.mark.parametrize("options", [
    {"message_size": 20}, {"message_size": 20, "gradient_as_bucket_view": True},
    {"delay_allreduce": True}, {"num_allreduce_streams": 2, "message_size": 20},
], ids=["copies", "views", "delayed", "two_streams"])  # fmt: skip
REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])


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
        self.misses_first = False

    def run(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        if self.how is None:
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "whole":
            return self.run(self.body, x)
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        run = self.run if self.how != "whole" else lambda f, *a: f(*a)
        h = self.entry(x)
        if self.how == "sequential":
            h = checkpoint_sequential(self.blocks, 2, h, use_reentrant=self.reentrant)
        elif self.how == "some":
            h = self.blocks[0](h)
            h = run(self.blocks[1], h)
            h = run(self.blocks[3], self.blocks[2](h))
        elif self.how == "nested":
            h = run(lambda y: self.blocks[1](run(self.blocks[0], y)), h)
            h = self.blocks[3](self.blocks[2](h))
        elif self.how == "in_and_out":
            # The same layer inside and outside of a segment.
            h = self.blocks[3](self.blocks[2](run(self.blocks[1], self.blocks[0](h))))
            h = h + self.blocks[1](h)
        elif self.how == "shared_twice":
            if not self.misses_first:
                h = run(self.blocks[0], run(self.blocks[0], h))
            h = self.blocks[1](h)
            h = self.blocks[3](self.blocks[2](h))
        elif self.how == "shared_in_one":
            h = run(lambda y: self.blocks[0](self.blocks[0](y)), h)
            h = self.blocks[3](self.blocks[2](self.blocks[1](h)))
        else:
            for block in self.blocks:
                h = run(block, h)
        return self.exit(h)


HOW = [
    "whole",
    "each",
    "sequential",
    "some",
    "nested",
    "in_and_out",
    "shared_twice",
    "shared_in_one",
]


def _trains(
    rank: int, world: int, how: str, reentrant: bool, options: dict[str, Any]
) -> dict[str, int]:
    model = build(Blocks)
    model.how, model.reentrant = how, reentrant
    ddp = DistributedDataParallel(model, **options)
    for step in range(4):

        def loss(net: nn.Module, r: int, step: int = step) -> Tensor:
            # Reentrant checkpointing needs an input that requires a gradient.
            return net(data(r, step).requires_grad_()).square().mean()

        locally, exact = [], to_reference(model)
        for r in range(world):
            # The reference does not checkpoint the whole model, which does not affect gradients.
            plain = copy.deepcopy(exact)
            plain.how = None if how in ("whole", "each", "sequential", "some", "nested") else how
            plain.reentrant = False
            plain(widen(data(r, step))).square().mean().backward()
            locally.append(gradients(plain))
        ddp.zero_grad(set_to_none=step % 2 == 0)
        loss(ddp, rank).backward()
        check_gradients(ddp, mean_over_ranks(locally), f"{how}, step {step}", 1e-5)
        check_same_on_all_ranks([p.grad for p in ddp.parameters()], f"{how}, step {step}")
    return ddp.statistics()


@OPTIONS
@REENTRANT
@pytest.mark.parametrize("how", HOW)
def test_checkpointing_every_form_averages(
    ranks: RankPool, how: str, reentrant: bool, options: dict[str, Any]
) -> None:
    for statistics in ranks.run(2, _trains, how, reentrant, options):
        assert statistics["plans_recorded"] == 1
        assert statistics["backwards"] == 4
        if not options.get("delay_allreduce"):
            assert statistics["launched_in_backward"] > 0, "nothing overlapped with backward"


@pytest.mark.parametrize("how", ["each", "sequential"])
def test_checkpointing_overlaps_as_much_as_without(ranks: RankPool, how: str) -> None:
    options = {"message_size": 20}
    plain = ranks.run(2, _trains, "none", False, options)[0]
    for reentrant in (False, True):
        with_it = ranks.run(2, _trains, how, reentrant, options)[0]
        assert with_it["launched_in_backward"] == plain["launched_in_backward"]


def _module_returns_nothing_known(rank: int, world: int) -> None:
    """The loss does not pass through a known output, so only gradients reveal the backward."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = build(Blocks)
            self.result: Tensor | None = None

        def forward(self, x: Tensor) -> str:
            self.result = self.blocks(x)
            return "see .result"

    model = Hidden()
    model.blocks.how = "each"
    ddp = DistributedDataParallel(model, message_size=20)
    for step in range(3):
        locally = []
        for r in range(world):
            plain = copy.deepcopy(model)
            plain.zero_grad()
            plain(data(r, step))
            plain.result.sum().backward()
            locally.append(gradients(plain))
        model.result = None
        ddp.zero_grad()
        check_equal(ddp(data(rank, step)), "see .result", "output")
        model.result.sum().backward()
        model.result = None
        check_gradients(ddp, mean_over_ranks(locally), f"step {step}", 1e-5)


def test_checkpointing_unknown_output_averages(ranks: RankPool) -> None:
    ranks.run(2, _module_returns_nothing_known)
