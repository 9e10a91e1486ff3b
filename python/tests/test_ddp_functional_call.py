# SPDX-License-Identifier: BSD-3-Clause
"""torch.func.functional_call() on a wrapper uses the caller's tensors and does not change them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ddp_models import build, data
from ddp_support import (
    RankPool,
    alone,
    check,
    check_equal,
    check_gradients,
    check_near,
    check_same_on_all_ranks,
    check_step,
    gradients,
    mean_over_ranks,
    raises,
)
from torch import Tensor, nn
from torch.func import functional_call

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, 2)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale)


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step)).square().sum()


def _make(**options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(build(Net), **{"message_size": 12, **options})
    check_step(ddp, _loss, "before")
    return ddp


def _check_goes_on(ddp: DistributedDataParallel, backwards: int) -> None:
    for step in range(2):
        check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"after, step {step}")
    check_equal(ddp.statistics()["backwards"], backwards + 2, "backwards of the first engine")


def _others(ddp: nn.Module, rank: int, kind: str) -> dict[str, Tensor]:
    """Tensors for every parameter, which differ by rank."""
    found = {name: p.detach() * 0.5 + 0.1 * rank for name, p in ddp.named_parameters()}
    if kind == "parameters":
        return {name: nn.Parameter(t) for name, t in found.items()}
    return {name: t.requires_grad_(kind == "leaves") for name, t in found.items()}


def _leaves(rank: int, world: int, kind: str, options: dict[str, Any]) -> None:
    ddp = _make(**options)
    ddp.zero_grad()
    for step in range(2):
        tensors = _others(ddp, rank, kind)
        before = {name: t.detach().clone() for name, t in tensors.items()}
        plain = {name.removeprefix("module."): t for name, t in before.items()}
        plain = {name: t.requires_grad_() for name, t in plain.items()}
        expected = functional_call(build(Net), plain, data(rank, step)).square().sum()
        output = functional_call(ddp, tensors, data(rank, step))
        check_near(output.square().sum(), expected, "the loss", 1e-6)
        if kind != "constants":
            output.square().sum().backward()
            expected.backward()
        for name, tensor in tensors.items():
            check_equal(tensor.detach(), before[name], f"the caller's {name}")
            if kind != "constants":  # only on this rank
                check_near(tensor.grad, plain[name.removeprefix("module.")].grad, name, 1e-5)
    check(all(p.grad is None for p in ddp.parameters()), "a parameter got a gradient")
    _check_goes_on(ddp, ddp.statistics()["backwards"])


@pytest.mark.parametrize("options", [{}, {"delay_allreduce": True, "message_size": 10_000_000}],
                         ids=["buckets", "delayed"])  # fmt: skip
@pytest.mark.parametrize("kind", ["leaves", "parameters", "constants"])
def test_functional_call_leaf_tensors_are_the_callers_own(
    ranks: RankPool, kind: str, options: dict[str, Any]
) -> None:
    ranks.run(2, _leaves, kind, options)


def _computed(rank: int, world: int) -> None:
    """As in MAML: gradients of weights computed from the parameters reach the parameters."""
    ddp = _make()

    def adapted_loss(model: nn.Module, r: int, step: int) -> Tensor:
        names, parameters = zip(*model.named_parameters(), strict=True)
        slopes = torch.autograd.grad(_loss(model, r, step), parameters, create_graph=True)
        moved = [p - 0.1 * g for p, g in zip(parameters, slopes, strict=True)]
        moved_by_name = dict(zip(names, moved, strict=True))
        return functional_call(model, moved_by_name, data(r, step + 50)).square().sum()

    for step in range(3):
        check_step(ddp, lambda m, r, s=step: adapted_loss(m, r, s), f"step {step}")
    _check_goes_on(ddp, 4)


def test_functional_call_computed_weights_average_what_they_are_computed_of(
    ranks: RankPool,
) -> None:
    ranks.run(2, _computed)


def _partial(rank: int, world: int, on: list[int]) -> None:
    """The module's other parameters are averaged. A replaced one counts as unused."""
    ddp = _make()
    weight = torch.full((2, 5), 0.3 + rank, requires_grad=True)

    def loss(model: nn.Module, r: int, w: Tensor) -> Tensor:
        if r not in on:
            return _loss(model, r)
        prefix = "module." if isinstance(model, DistributedDataParallel) else ""
        return functional_call(model, {f"{prefix}last.weight": w}, data(r)).square().sum()

    for step in range(2):
        expected = mean_over_ranks([
            alone(ddp.module, lambda m, r=r: loss(m, r, torch.full((2, 5), 0.3 + r)))
            for r in range(world)
        ])  # fmt: skip
        ddp.zero_grad()
        weight.grad = None
        loss(ddp, rank, weight).backward()
        check_gradients(ddp, expected, f"step {step}", 1e-5)
        check_same_on_all_ranks([p.grad for p in ddp.parameters()], f"step {step}")
        check_equal(weight.grad is not None, rank in on, "a gradient of the caller's tensor")
        check_equal(weight.detach(), torch.full((2, 5), 0.3 + rank), "the caller's tensor")
    _check_goes_on(ddp, 3)


@pytest.mark.parametrize("on", [[0, 1], [0], [1]], ids=["all_ranks", "rank_0", "rank_1"])
def test_functional_call_of_some_parameters_averages_the_others(
    ranks: RankPool, on: list[int]
) -> None:
    ranks.run(2, _partial, on)


def _buffers(rank: int, world: int, on: list[int]) -> None:
    ddp = _make(broadcast_buffers=True)
    ddp.module.scale.fill_(1.0 + rank)
    mine = torch.full((5,), 3.0 + rank)
    for _ in range(2):
        if rank in on:
            output = functional_call(ddp, {"module.scale": mine}, data(rank))
        else:
            output = ddp(data(rank))
        output.sum().backward()
    check_equal(mine, torch.full((5,), 3.0 + rank), "the caller's buffer")
    # In this forward it is the rank's own. In the next, the module's is broadcast from rank 0.
    kept = 1.0 + rank if rank in on else 3.0 if 0 in on else 1.0
    check_equal(ddp.module.scale, torch.full((5,), kept), "the module's buffer")
    ddp(data(rank))
    check_equal(ddp.module.scale, torch.ones(5), "the module's buffer, taken from rank 0")


@pytest.mark.parametrize("on", [[0, 1], [1]], ids=["all_ranks", "rank_1"])
def test_functional_call_buffers_are_not_written_to(ranks: RankPool, on: list[int]) -> None:
    ranks.run(2, _buffers, on)


def _transformed(module: nn.Module, prefix: str, x: Tensor) -> list[Tensor]:
    def of_scale(scale: Tensor) -> Tensor:
        return functional_call(module, {f"{prefix}scale": scale}, x)

    scales = torch.tensor([[1.0] * 5, [2.0] * 5])
    _, derivative = torch.func.jvp(module, (x,), (torch.ones_like(x),))
    return [torch.func.vmap(module)(x), derivative, torch.func.vmap(of_scale)(scales)]


def _transforms(rank: int, world: int, broadcast_buffers: bool) -> None:
    """Gradients of torch.func's transforms are not averaged, on one rank or on all."""
    ddp = _make(broadcast_buffers=broadcast_buffers)
    # specific to a rank until its next forward outside of transforms
    ddp.module.scale.fill_(1.0 + rank)
    ddp.zero_grad()
    before = ddp.statistics()
    parameters = dict(ddp.named_parameters())

    def loss(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(ddp, tensors, x).square().sum()

    if rank == 0:
        slopes = torch.func.grad(loss)(parameters, data(rank))
        expected = alone(ddp.module, _loss_of_rank_0)
        for name, slope in slopes.items():
            check_near(slope, expected[name.removeprefix("module.")], name, 1e-5)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, data(rank))
        for name, slope in each.items():
            check_near(slope.sum(0), expected[name.removeprefix("module.")], name, 1e-5)
        plain = _transformed(copy.deepcopy(ddp.module), "", data(rank))
        for found, result in zip(_transformed(ddp, "module.", data(rank)), plain, strict=True):
            check_near(found, result, "a transform", 1e-5)
    ddp.module.scale.fill_(1.0)
    check(all(g is None for g in gradients(ddp).values()), "a parameter got a gradient")
    after = ddp.statistics()
    check_equal(after["launched_at_end"], before["launched_at_end"], "messages")
    _check_goes_on(ddp, 1)


def _loss_of_rank_0(model: nn.Module) -> Tensor:
    return _loss(model, 0)


@pytest.mark.parametrize("broadcast_buffers", [False, True])
def test_functional_call_under_transforms_communicates_nothing(
    ranks: RankPool, broadcast_buffers: bool
) -> None:
    ranks.run(2, _transforms, broadcast_buffers)


def _around_vmap(rank: int, world: int) -> None:
    """A backward outside of the transform averages. Inside it, buffers are the rank's own."""
    ddp = _make(broadcast_buffers=True)

    def loss(model: nn.Module, r: int) -> Tensor:
        return torch.func.vmap(model)(data(r)).square().sum()

    for step in range(2):
        ddp.module.scale.fill_(2.0)
        check_step(ddp, loss, f"step {step}")
    ddp.module.scale.fill_(1.0 + rank)
    torch.func.vmap(ddp)(data(rank))
    check_equal(ddp.module.scale, torch.full((5,), 1.0 + rank), "the rank's own buffer")
    ddp.module.first.weight = nn.Parameter(ddp.module.first.weight.detach().clone())
    with raises(RuntimeError, "cannot create one inside a transform of torch.func"):
        torch.func.vmap(ddp)(data(rank))
    ddp(data(rank)).sum().backward()
    check_equal(ddp.module.scale, torch.ones(5), "rank 0's buffer")
    check_step(ddp, _loss, "a forward outside of transforms")


def test_vmap_of_a_wrapper_is_averaged_by_a_backward_around_it(ranks: RankPool) -> None:
    ranks.run(2, _around_vmap)


def _without_engine(rank: int, world: int) -> None:
    import pickle

    copied = pickle.loads(pickle.dumps(_make()))
    tensors = _others(copied, rank, "leaves")
    with raises(RuntimeError, "functional_call()", "one forward of the wrapper itself"):
        functional_call(copied, tensors, data(rank))
    check_step(copied, _loss, "a forward of its own")
    functional_call(copied, tensors, data(rank)).sum().backward()


def test_functional_call_before_there_is_an_engine_raises(ranks: RankPool) -> None:
    ranks.run(2, _without_engine)
