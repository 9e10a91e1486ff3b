# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers that torch steps inside backward, before gradients are averaged, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import RankPool, check_equal, check_same_on_all_ranks, raises
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from apex.parallel import DistributedDataParallel, Reducer

pytestmark = pytest.mark.processes


def _apply(parameters: list[nn.Parameter]) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def _before(rank: int, world: int) -> None:
    for kind in (DistributedDataParallel, Reducer):
        model = _model()
        _apply([model[1].weight])
        with raises(RuntimeError, f"rank {rank}", "'1.weight'", "OverlappedOptimizer"):
            kind(model)


def test_optimizer_in_backward_before_wrapping_is_refused(ranks: RankPool) -> None:
    ranks.run(2, _before)


def _after(rank: int, world: int) -> None:
    model = _model()
    ddp = DistributedDataParallel(model)
    x = torch.full((2, 4), 1.0 + rank)
    ddp(x).sum().backward()
    ddp.zero_grad()
    _apply([model[0].bias])
    with raises(RuntimeError, f"rank {rank}", "'0.bias'"):
        ddp(x)
    with raises(RuntimeError, "'0.bias'"):
        ddp(x)
    model = _model()
    reducer = Reducer(model)
    _apply(list(model.parameters()))
    model(x).sum().backward()
    with raises(RuntimeError, "'0.weight'"):
        reducer.reduce()


def test_optimizer_in_backward_after_wrapping_is_refused_by_the_next_forward(
    ranks: RankPool,
) -> None:
    ranks.run(2, _after)


def _elsewhere(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(_model())
    other = _model()  # not wrapped, so it may be stepped at any time
    _apply(list(other.parameters()))
    x = torch.full((2, 4), 1.0 + rank)
    for _ in range(2):
        other(x).sum().backward()
        ddp(x).sum().backward()
    check_same_on_all_ranks([p.grad for p in ddp.parameters()], "gradients")


def test_optimizer_in_backward_of_another_module_is_left_alone(ranks: RankPool) -> None:
    ranks.run(2, _elsewhere)


def _alone(rank: int, world: int) -> None:
    model = _model()
    _apply(list(model.parameters()))
    ddp = DistributedDataParallel(model)
    before = model[0].weight.detach().clone()
    ddp(torch.ones(2, 4)).sum().backward()
    assert not torch.equal(model[0].weight, before)


def test_optimizer_in_backward_with_one_rank_steps(ranks: RankPool) -> None:
    ranks.run(1, _alone)


class _ByHand:
    """A custom optimizer that steps parameter by parameter."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None


def _hooked(rank: int, world: int, kind: str, views: bool) -> None:
    """An optimizer per parameter, stepped when its gradient is ready."""
    torch.manual_seed(rank)
    model = _model()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views, message_size=8)
    before = [p.detach().clone() for p in model.parameters()]

    def optimizer_of(parameter: nn.Parameter) -> Any:
        if kind == "by hand":
            return _ByHand([parameter])
        return torch.optim.AdamW([parameter], lr=0.1, fused=kind == "fused")

    optimizers = {p: optimizer_of(p) for p in model.parameters()}
    handles = [
        p.register_post_accumulate_grad_hook(lambda q: optimizers[q].step())
        for p in model.parameters()
    ]
    x = torch.full((2, 4), 1.0 + rank)
    for _ in range(1 if kind == "by hand" else 3):  # after a manual update, ranks are out of step
        with raises(RuntimeError, f"rank {rank}: parameter '", "is updated inside backward"):
            ddp(x).sum().backward()
    if kind != "by hand":  # refused before it writes anything
        for parameter, old in zip(model.parameters(), before, strict=True):
            check_equal(parameter.detach(), old, "parameter")
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("kind", ["foreach", "fused", "by hand"])
def test_optimizer_stepped_by_a_gradients_hook_is_refused(
    ranks: RankPool, kind: str, views: bool
) -> None:
    ranks.run(2, _hooked, kind, views)


def _allowed(rank: int, world: int) -> None:
    """Allowed: other models' optimizers, steps of a local backward, and a group of one rank."""
    model, other = _model(), nn.Linear(2, 2)
    alone = [dist.new_group([r]) for r in range(world)][rank]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    ddp(torch.ones(2, 4)).sum().backward()
    handle.remove()
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = model[1].bias.register_post_accumulate_grad_hook(lambda p: local.step())
    with ddp.no_sync():
        ddp(torch.ones(2, 4)).sum().backward()
    handle.remove()
    single = _model()
    one = DistributedDataParallel(single, process_group=alone)
    steps = torch.optim.SGD(single.parameters(), lr=0.1)
    handle = single[0].weight.register_post_accumulate_grad_hook(lambda p: steps.step())
    one(torch.ones(2, 4)).sum().backward()
    handle.remove()


def test_steps_in_backward_that_no_average_is_missing_in_are_allowed(ranks: RankPool) -> None:
    ranks.run(2, _allowed)
