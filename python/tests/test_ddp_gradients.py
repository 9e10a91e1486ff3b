# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of DistributedDataParallel against the same model on the concatenated batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_models import Mlp, backward, build, make
from ddp_support import (
    DEVICE,
    TOLERANCE,
    RankPool,
    check,
    check_equal,
    check_gradients,
    check_near,
    check_step,
    gradients,
    host_channel,
    on_ranks,
    to_reference,
    widen,
)
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class SharedEmbedding(nn.Module):
    """One table that is used for both inputs and for the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.table(x).unbind(1)
        return self.decoder(torch.tanh(self.mix(left) + right))


#: Models, and what they take. ddp_programs.py has others.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Tensor]]] = {
    "mlp": (Mlp, lambda g: torch.randn(3, 6, generator=g)),
    "lstm": (Lstm, lambda g: torch.randn(3, 7, 4, generator=g)),
    "shared_embedding": (SharedEmbedding, lambda g: torch.randint(11, (3, 2, 4), generator=g)),
}


def wrap(model: nn.Module, options: dict[str, Any]) -> DistributedDataParallel:
    options = dict(options)
    if options.pop("_triggers", False):
        options["allreduce_trigger_params"] = list(model.parameters())[1::2]
    return DistributedDataParallel(model, **options)


def _trains_right(rank: int, world: int, name: str, options: dict[str, Any]) -> dict[str, int]:
    make, inputs = MODELS[name]
    # Different values on other ranks. Rank 0's must be used.
    ddp, reference = wrap(build(make, rank), options), to_reference(build(make, 0))
    for step in range(4):
        batches = [inputs(torch.Generator().manual_seed(1000 * step + r)) for r in range(world)]
        check_step(ddp, lambda m, r, b=batches: m(b[r]).square().mean(), f"{name}, step {step}")
        reference.zero_grad()
        reference(widen(torch.cat(batches))).square().mean().backward()
        check_gradients(ddp, gradients(reference), f"{name}, step {step}, whole batch", 1e-4)
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


#: Options, whether ranks share memory (where sums are in float32), and an average of 40,000.
IN_HALF: list[tuple[dict[str, Any], str, float]] = [
    ({}, "0", math.inf),
    ({}, "1", 4e4 if DEVICE == "cpu" else math.inf),
    ({"allreduce_always_fp32": True}, "0", 4e4),
    ({"gradient_predivide_factor": 8.0}, "0", 4e4),
]


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_sum_beyond_half_range_is_finite_with_the_options_for_it(
    rank: int, world: int, views: bool
) -> None:
    for options, channel, expected in IN_HALF:
        with host_channel(channel):
            ddp = DistributedDataParallel(
                _Vector(4, torch.float16), gradient_as_bucket_view=views, **options
            )
            for _ in range(3):
                ddp.zero_grad()
                ddp(torch.full((4,), 4e4, dtype=torch.float16)).backward()
                for grad in (ddp.module.a.grad, ddp.module.b.grad):
                    want = torch.full((4,), expected, dtype=torch.float16)
                    check_equal(grad, want, f"{options}, {channel}")


def _plans(rank: int, world: int, options: dict[str, Any]) -> list[list[str]]:
    ddp = wrap(make(), options)
    check(ddp.needs_refresh, "a plan before the first backward")
    backward(ddp, rank, 0)
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
    table = nn.Embedding(13, 5, sparse=True)
    ddp = DistributedDataParallel(nn.Sequential(table, nn.Linear(5, 2)))
    for step in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([[rank, step], [5, 6]])).sum().backward()
        check(table.weight.grad.is_sparse, f"the gradient is dense in step {step}")


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_gradient_is_defined_in_backward_and_kept_as_long_as_it_is_held(
    rank: int, world: int, views: bool
) -> None:
    ddp = DistributedDataParallel(make(), gradient_as_bucket_view=views)
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
        backward(ddp, rank, step)
        backward(plain, rank, step)
        local = gradients(plain)
        for name, grad in during.items():
            want = widen(local[name.removeprefix("module.")])
            check_near(grad, want, f"{name} in backward {step}", TOLERANCE[torch.float32])
        for grad, value in held:
            check_equal(torch.equal(grad, value), True, f"a gradient of an earlier step, {step}")
        if step != 1:
            held += [(p.grad, p.grad.clone()) for _, p in parameters]


@on_ranks(2)
def test_retained_buffers_hold_every_gradient_after_one_that_the_script_holds(
    rank: int, world: int
) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    ddp = DistributedDataParallel(layers, retain_allreduce_buffers=True)
    x = torch.randn(2, 3)
    ddp(x).sum().backward()
    held = [buffer[:] for buffer in ddp.allreduce_buffers]
    before = layers[1].weight.grad.clone()
    layers[0](x).sum().backward()  # does not reach the second layer
    check_equal(layers[1].weight.grad, before, "the second layer's gradient")
    ends = [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in ddp.allreduce_buffers]
    for name, parameter in layers.named_parameters():
        at = parameter.grad.data_ptr()
        check(any(first <= at < end for first, end in ends), f"{name}'s gradient is in no buffer")
    check(all(old.data_ptr() != first for old in held for first, _ in ends), "a held buffer")


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


class Zeros(torch.autograd.Function):
    """Its gradient is a ZeroTensor, which has no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch._efficientzerotensor(grad.shape, device=grad.device)


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_zero_tensor_gradient_counts_as_zeros(rank: int, world: int, views: bool) -> None:
    for size in (20, 1):
        layer = nn.Linear(4, 3)
        layer.extra = nn.Parameter(torch.ones(3, 4))  # no other gradient is added to its own
        ddp = DistributedDataParallel(layer, message_size=size, gradient_as_bucket_view=views)
        for _ in range(3):
            ddp.zero_grad()
            y = ddp(torch.ones(2, 4)).sum() * 0
            ((Zeros.apply(layer.extra) if rank == 1 else layer.extra).sum() + y).backward()
            check_near(layer.extra.grad, torch.full((3, 4), 0.5), "half of rank 0's", 1e-6)
            layer.extra.grad.add_(1)  # it can be written
