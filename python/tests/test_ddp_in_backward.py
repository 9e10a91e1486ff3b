# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers that torch steps inside backward, so before gradients are averaged, are refused."""

from __future__ import annotations

import pytest
import torch
from ddp_support import RankPool, check_same_on_all_ranks, raises
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
    other = _model()  # is not wrapped, and may be stepped as it likes
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
