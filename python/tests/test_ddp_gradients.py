# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of DistributedDataParallel against the same model on the concatenated batch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from ddp_models import MODELS, Model, batch, loss_of, whole_batch
from ddp_support import (
    TOLERANCE,
    RankPool,
    check,
    check_equal,
    check_gradients,
    check_near,
    check_same_on_all_ranks,
    check_step,
    gradients,
    host_channel,
    mean_over_ranks,
    on_ranks,
    to_reference,
    widen,
)
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def wrap(model: nn.Module, options: dict[str, Any]) -> DistributedDataParallel:
    options = dict(options)
    if options.pop("_triggers", False):
        options["allreduce_trigger_params"] = list(model.parameters())[1::2]
    return DistributedDataParallel(model, **options)


def _local(model: nn.Module, spec: Model, rank: int, step: int) -> dict[str, Tensor | None]:
    alone = copy.deepcopy(model)
    alone.zero_grad()
    loss_of(alone(*batch(spec, rank, step))).backward()
    return gradients(alone)


def _trains_right(rank: int, world: int, name: str, options: dict[str, Any]) -> dict[str, int]:
    spec = MODELS[name]
    # Different values on other ranks. Rank 0's must be used.
    plain = spec.make(seed=0)
    ddp = wrap(spec.make(seed=rank), options)
    reference = to_reference(plain)
    loosely = {torch.float32: 1e-4, torch.float64: 1e-12, torch.float16: 2e-2}.get(spec.dtype, 8e-2)
    if spec.dtype is None and name != "mixed_dtypes":
        loosely = 1e-4
    for step in range(4):
        ddp.zero_grad(set_to_none=step % 2 == 0)
        reference.zero_grad()
        loss_of(ddp(*batch(spec, rank, step))).backward()
        loss_of(reference(*widen(whole_batch(spec, world, step)))).backward()
        what = f"{name}, step {step}"
        check_gradients(ddp, gradients(reference), f"{what}, whole batch", loosely)
        locally = [_local(plain, spec, r, step) for r in range(world)]
        mean = mean_over_ranks(locally)
        for key, grad in gradients(ddp).items():
            scale = max(local[key].abs().max().item() if grad.numel() else 0.0 for local in locally)
            check_near(grad, mean[key], f"{what}, mean of ranks: {key}", None, scale)
        check_same_on_all_ranks([p.grad for p in ddp.parameters()], what)
        for parameter in ddp.parameters():
            check_equal(parameter.grad.dtype, parameter.dtype, f"{what}: dtype of the gradient")
    return ddp.statistics()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_every_model_equal_whole_batch(ranks: RankPool, name: str, world: int) -> None:
    ranks.run(world, _trains_right, name, {"message_size": 40})


def test_message_size_small_launches_in_backward(ranks: RankPool) -> None:
    for statistics in ranks.run(2, _trains_right, "mlp", {"message_size": 20}):
        assert statistics["launched_in_backward"] > 0
        assert statistics["plans_recorded"] == 1
        assert statistics["backwards"] == 4


def test_delay_allreduce_launches_at_the_end_only(ranks: RankPool) -> None:
    for statistics in ranks.run(2, _trains_right, "mlp", {"delay_allreduce": True}):
        assert statistics["launched_in_backward"] == 0
        assert statistics["launched_at_end"] == 4


# --- that each option does something ---


class _Vector(nn.Module):
    """Its gradient is its input."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(count, dtype=dtype))
        self.b = nn.Parameter(torch.zeros(count, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a * x).sum() + (self.b * x).sum()


def _step(ddp: nn.Module, value: float, dtype: torch.dtype) -> Tensor:
    ddp.zero_grad()
    ddp(torch.full((4,), value, dtype=dtype)).backward()
    check_equal(ddp.module.a.grad, ddp.module.b.grad, "both gradients")
    return ddp.module.a.grad


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_always_fp32_sum_beyond_half_range_is_finite(rank: int, world: int, views: bool) -> None:
    # Sums in shared memory are always in float32.
    for always, channel, expected in ((False, "0", math.inf), (False, "1", 4e4), (True, "0", 4e4)):
        with host_channel(channel):
            ddp = DistributedDataParallel(
                _Vector(4, torch.float16),
                allreduce_always_fp32=always,
                gradient_as_bucket_view=views,
            )
            for _ in range(3):
                grad = _step(ddp, 40000.0, torch.float16)
                check_equal(
                    grad,
                    torch.full_like(grad, expected),
                    f"allreduce_always_fp32={always}, {channel}",
                )


@on_ranks(2)
def test_predivide_sum_beyond_half_range_is_finite(rank: int, world: int) -> None:
    # Without the option, the sum overflows. Divided by 8 first, it does not.
    ddp = DistributedDataParallel(_Vector(4, torch.float16), gradient_predivide_factor=8.0)
    for _ in range(2):
        grad = _step(ddp, 40000.0, torch.float16)
        check_equal(grad, torch.full_like(grad, 40000.0), "predivided")


def _plans(rank: int, world: int, options: dict[str, Any]) -> list[list[str]]:
    spec = MODELS["mlp"]
    ddp = wrap(spec.make(), options)
    check(ddp.needs_refresh, "a plan before the first backward")
    loss_of(ddp(*batch(spec, rank))).backward()
    check(not ddp.needs_refresh, "no plan after the first backward")
    names = [name for name, _ in ddp.module.named_parameters()]
    return [[names[index] for index in bucket] for bucket in ddp._reducer.plan()]


def test_trigger_params_plan_closes_at_triggers(ranks: RankPool) -> None:
    plans = ranks.run(2, _plans, {"_triggers": True})
    # Every bias is a trigger, so no bucket continues after one.
    for plan in plans:
        assert plan == plans[0]
        assert all(not name.endswith("bias") for bucket in plan for name in bucket[:-1])
        assert len(plan) >= 3


def test_message_size_plan_counts_elements(ranks: RankPool) -> None:
    sizes = {"a.weight": 54, "a.bias": 9, "b.weight": 63, "b.bias": 7, "c.weight": 28, "c.bias": 4}
    for plan in ranks.run(2, _plans, {"message_size": 70}):
        assert len(plan) == 2
        counts = [sizes[name] for name in plan[0]]
        assert sum(counts) >= 70 > sum(counts[:-1])
    assert all(len(p) == 1 for p in ranks.run(2, _plans, {"message_size": 165}))
    assert all(len(p) == 6 for p in ranks.run(2, _plans, {"message_size": 1}))


def test_bucket_cap_plan_counts_bytes(ranks: RankPool) -> None:
    # 165 float32 elements are 660 bytes. The largest parameter has 252.
    assert all(len(p) == 1 for p in ranks.run(2, _plans, {"bucket_cap_mb": 661 / (1 << 20)}))
    assert all(len(p) == 2 for p in ranks.run(2, _plans, {"bucket_cap_mb": 253 / (1 << 20)}))


@on_ranks(2)
def test_sparse_embedding_gradient_stays_sparse(rank: int, world: int) -> None:
    spec = MODELS["sparse_embedding"]
    ddp = DistributedDataParallel(spec.make())
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp(*batch(spec, rank, step))).backward()
        check(ddp.module.table.weight.grad.is_sparse, f"the gradient is dense in step {step}")


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_gradient_is_defined_in_backward_and_kept_as_long_as_it_is_held(
    rank: int, world: int, views: bool
) -> None:
    spec = MODELS["mlp"]
    ddp = DistributedDataParallel(spec.make(), gradient_as_bucket_view=views)
    plain = copy.deepcopy(ddp.module)
    parameters = list(ddp.named_parameters())
    during: dict[str, Tensor | None] = {}
    held: list[tuple[Tensor, Tensor]] = []

    def read(_: Tensor) -> None:  # all other gradients are in the bucket, which waits for this one
        during.update({n: None if p.grad is None else p.grad.clone() for n, p in parameters[2:]})

    parameters[0][1].register_hook(read)
    for step in range(4):
        ddp.zero_grad()
        plain.zero_grad()
        loss_of(ddp(*batch(spec, rank, step))).backward()
        loss_of(plain(*batch(spec, rank, step))).backward()
        local = gradients(plain)
        for name, grad in during.items():
            want = widen(local[name.removeprefix("module.")])
            check_near(grad, want, f"{name} in backward {step}", TOLERANCE[torch.float32])
        for grad, value in held:
            check_equal(torch.equal(grad, value), True, f"a gradient of an earlier step, {step}")
        if step != 1:
            held += [(p.grad, p.grad.clone()) for _, p in parameters]


class _Distilled(nn.Module):
    """A student with a frozen teacher that was created in inference mode."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.student = nn.Linear(4, 2)
        with torch.inference_mode():
            self.teacher = nn.Linear(4, 2).requires_grad_(False)
            self.teacher.weight.fill_(rank)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return (self.student(x) - target).square().sum()


@on_ranks(2)
def test_frozen_parameters_made_in_inference_mode(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(_Distilled(rank))
    check(torch.equal(ddp.module.teacher.weight, torch.zeros(2, 4)), "not rank 0's teacher")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = torch.arange(12.0).view(3, 4)
    for step in range(3):
        check_step(ddp, lambda model, rank: model(torch.sin(x * (1 + rank))), f"step {step}")
        optimizer.step()
