# SPDX-License-Identifier: BSD-3-Clause
"""Modules that change after wrapping: which changes count, which do not, and which are refused."""

from __future__ import annotations

import pytest
import torch
from ddp_models import build, data
from ddp_support import (
    bucket_names,
    check,
    check_equal,
    check_same_on_all_ranks,
    check_step,
    host_channel,
    on_ranks,
    raises,
)
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(data(rank), [0, 1, 2]).square().sum()


def _layer(rank: int, outputs: int = 4) -> nn.Linear:
    """A layer with different values on each rank."""
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        return nn.Linear(4, outputs)


@pytest.mark.parametrize("repair", ["taken back", "made on the other rank", "made on all ranks"])
@on_ranks(2)
def test_change_refused_then_repaired_averages(rank: int, world: int, repair: str) -> None:
    ddp = DistributedDataParallel(build(), message_size=20)
    layers = ddp.module.layers
    old = layers[1]
    check_step(ddp, _loss, "before")
    layers[1] = _layer(rank, 4 + rank)
    for attempt in range(2):
        with raises(RuntimeError, "rank 1's model differs from rank 0's", "[4, 4]", "[5, 4]"):
            ddp(data(rank), [0])
        check(layers[1] is not old, f"attempt {attempt}")
    if repair == "taken back":
        layers[1] = old
    elif repair == "made on the other rank" and rank == 1:
        layers[1] = _layer(rank)
    elif repair == "made on all ranks":
        layers[1] = _layer(rank)
    ddp(data(rank), [0])
    check_same_on_all_ranks(list(ddp.parameters()), "parameters after the repair")
    for step in range(3):
        check_step(ddp, _loss, f"after the repair, step {step}")
    names = [name for bucket in bucket_names(ddp) for name in bucket]
    check_equal(len(names), 6, "parameters in the plan")


@on_ranks(2)
def test_module_assigned_averages(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(build(), message_size=20)
    check_step(ddp, _loss, "before")
    ddp.module = build(seed=10 + rank)
    ddp(data(rank), [0])
    check_same_on_all_ranks(list(ddp.parameters()), "parameters of the new module")
    for step in range(3):
        check_step(ddp, _loss, f"the new module, step {step}")


class Reassigns(nn.Module):
    """Assigns a module without parameters, and a buffer, in forward."""

    def __init__(self, on: list[int], rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.mine = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.act: nn.Module = nn.Identity()
        self.register_buffer("seen", torch.zeros(1))
        self.makes_one = rank in on

    def forward(self, x: Tensor) -> Tensor:
        if self.makes_one:
            self.act = nn.Tanh()
            self.seen = self.seen + 1
        else:
            self.act(x)
        return self.layers[1](torch.tanh(self.layers[0](x)))


@pytest.mark.parametrize("on", [[], [1], [0, 1]], ids=["no_rank", "one_rank", "all_ranks"])
@on_ranks(2)
def test_module_without_parameters_replaced_in_forward_is_no_change(
    rank: int, world: int, on: list[int]
) -> None:
    model = build(lambda: Reassigns(on, rank))
    ddp = DistributedDataParallel(model, message_size=20)
    with torch.no_grad():
        model.mine.fill_(rank)  # would be rank 0's if parameters were broadcast again
    for step in range(4):
        check_step(ddp, lambda m, r, s=step: m(data(r, s)).square().sum(), f"step {step}")
    check_equal(model.mine.data, torch.full((2,), float(rank)), "a parameter of the rank's own")
    check_equal(ddp.statistics()["backwards"], 4, "backwards of the first engine")
    check_equal(ddp.statistics()["plans_recorded"], 1, "plans")
    # A change that counts is still detected.
    model.layers[0] = _layer(rank)
    ddp(data(rank))
    check_step(ddp, lambda m, r: m(data(r)).square().sum(), "a layer replaced")


def _closing(ddp: DistributedDataParallel) -> list[str]:
    return [bucket[-1] for bucket in bucket_names(ddp)]


@on_ranks(2)
def test_trigger_parameters_that_are_replaced_are_followed_by_name(rank: int, world: int) -> None:
    model = build()
    layers = model.layers
    triggers = [layer.weight for layer in layers]
    ddp = DistributedDataParallel(model, allreduce_trigger_params=triggers)
    check_step(ddp, _loss, "first")
    every = [f"layers.{i}.weight" for i in (2, 1, 0)]
    check_equal(_closing(ddp), every, "closing parameters")
    other = build(seed=5 + rank).state_dict()
    model.load_state_dict(other, assign=True)
    ddp(data(rank), [0])
    check(layers[1].weight is not triggers[1], "the parameter was not replaced")
    check_step(ddp, _loss, "all parameters replaced")
    check_equal(_closing(ddp), every, "closing parameters, replaced")


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(3000, 10))
        self.small = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.large.square().sum() * x[0, 0] + self.small.square().sum() * x[0, 1]


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16)
        self.last = nn.Linear(16, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.flatten().abs() * 100).long() % self.words.num_embeddings
        return self.last(self.words(ids)).square()


@pytest.mark.parametrize("holds", ["reducer", "graph", "nothing"])
@on_ranks(2)
def test_data_of_another_shape_while_its_accumulator_is_alive(
    rank: int, world: int, holds: str
) -> None:
    """Hazard: the accumulator of the old shape lives on, in the old reducer or in a graph.

    transformers' ``resize_token_embeddings()`` does this: ``.data`` of another shape and a new
    output layer.
    """
    ddp = DistributedDataParallel(_Words())
    for step, rows in enumerate((70, 64, 64, 80)):
        torch.manual_seed(step)
        held = ddp(data(rank)) if holds == "graph" else None
        ddp.module.words.weight.data = torch.randn(rows, 16)
        if holds == "reducer":
            ddp.module.last = nn.Linear(16, rows, bias=False)
        ddp.zero_grad()
        check_step(ddp, lambda model, rank: model(data(rank)).sum(), f"{rows} rows")
        del held


# Gloo used to end the process.
@pytest.mark.parametrize("channel", ["1", "0"], ids=["shared_memory", "gloo"])
@pytest.mark.parametrize("kind", ["dtype", "shape"])
@on_ranks(2)
def test_parameter_of_another_kind_on_each_rank_raises(
    rank: int, world: int, kind: str, channel: str
) -> None:
    """Every rank leaves the plan, and their messages would have different sizes."""
    with host_channel(channel):
        ddp = DistributedDataParallel(_Scale())
    small = ddp.module.small
    for step in range(2):
        check_step(ddp, lambda model, rank: model(data(rank)), f"step {step}")
    ddp.zero_grad()
    if kind == "dtype":
        small.data = small.data.to([torch.bfloat16, torch.float64][rank])
    else:
        small.data = torch.ones(4 + rank, 2)
    with raises(RuntimeError, "rank 1's model differs from rank 0's", "'small'"):
        ddp(data(rank)).backward()
    ddp.zero_grad()
    small.data = torch.ones(7, 2)
    for step in range(2):
        check_step(ddp, lambda model, rank: model(data(rank)), f"alike again, step {step}")
