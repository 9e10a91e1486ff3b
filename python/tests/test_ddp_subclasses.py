# SPDX-License-Identifier: BSD-3-Clause
"""Parameters, gradients and buffers without their own memory. Subclasses that hold other tensors
are synchronized. Others are refused by name, on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import data
from ddp_subclasses import OpenWrapper, Pair, Quantized, Wrapper, plain
from ddp_support import (
    RankPool,
    check,
    check_equal,
    check_near,
    check_same_on_all_ranks,
    raises,
)
from torch import Tensor, nn
from torch.nn import functional as F

from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from apex.parallel import DistributedDataParallel, Reducer, SyncBatchNorm
from apex.parallel.LARC import LARC

pytestmark = pytest.mark.processes


def inner(tensor: Any) -> list[Tensor]:
    """The plain tensors that hold the values."""
    if isinstance(tensor, Wrapper):
        return [tensor.inner]
    if isinstance(tensor, Pair):
        return [tensor.a, tensor.b]
    if isinstance(tensor, Quantized):
        return [tensor.codes, tensor.scale]
    return [tensor]


def _pair(values: Tensor) -> Tensor:
    return Pair(values, torch.randn_like(values))


WRAPS = {"opaque": Wrapper, "open": OpenWrapper, "pair": _pair}


class Two(nn.Module):
    """A plain layer, and parameters that `wrap` converts to subclasses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        wrap = WRAPS[kind]
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(wrap(torch.randn(3, 4)))
        self.bias = nn.Parameter(wrap(torch.randn(3)))
        self.idle = nn.Parameter(wrap(torch.randn(2)))
        # A pair that flows into a plain layer stays a pair, so a plain parameter gets no gradient.
        self.deep = kind != "pair"

    def forward(self, x: Tensor, idle: bool) -> list[Tensor]:
        hidden = torch.tanh(self.first(x))
        y = F.linear(hidden if self.deep else x, self.weight, self.bias).square()
        losses = [y.sum(), hidden.square().sum()]
        return [*losses, self.idle.square().sum()] if idle else losses


def _expected(model: Two, rank: int, step: int, idle: bool) -> list[list[Tensor | None]]:
    """The float64 gradients of one rank, by parameter and inner tensor."""
    plain = copy.deepcopy(model.first).double()
    own = [[t.detach().double().requires_grad_() for t in inner(p)]
           for p in (model.weight, model.bias, model.idle)]  # fmt: skip
    x = data(rank, step, 6, 4).double()
    hidden = torch.tanh(plain(x))
    losses = [hidden.square().sum()]
    for weight, bias, other in zip(*own, strict=True):
        losses.append(F.linear(hidden if model.deep else x, weight, bias).square().sum())
        if idle:
            losses.append(other.square().sum())
    torch.autograd.backward(losses)
    return [[leaf.grad for leaf in one] for one in [*([p] for p in plain.parameters()), *own]]


def _mean(of_ranks: list[list[list[Tensor | None]]]) -> list[list[Tensor | None]]:
    def mean(grads: tuple[Tensor | None, ...]) -> Tensor | None:
        present = [grad for grad in grads if grad is not None]
        return sum(present) / len(grads) if present else None

    return [
        [mean(grads) for grads in zip(*parts, strict=True)] for parts in zip(*of_ranks, strict=True)
    ]


def _all_options(rank: int, world: int, kind: str) -> None:
    for options in OPTIONS:
        _trains(rank, world, kind, options)


def _trains(rank: int, world: int, kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(rank)
    model = Two(kind)
    parameters = [*model.first.parameters(), model.weight, model.bias, model.idle]
    ddp = DistributedDataParallel(model, **{"message_size": 7, **options})
    check_same_on_all_ranks([t for p in parameters for t in inner(p)], "at construction")
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for step in range(5):

        def idle(r: int, step: int = step) -> bool:  # on no rank, on all, on one
            return step == 1 or (step >= 3 and r == 1)

        expected = _mean([_expected(model, r, step, idle(r)) for r in range(world)])
        if step != 4:  # in step 4, gradients accumulate
            optimizer.zero_grad()
        before = [[] if p.grad is None else [t.clone() for t in inner(p.grad)] for p in parameters]
        torch.autograd.backward(ddp(data(rank, step, 6, 4), idle(rank)))
        for i, parameter in enumerate(parameters):
            what = f"step {step}, parameter {i}"
            if expected[i][0] is None:
                check(parameter.grad is None, f"{what}: a gradient")
                continue
            # A gradient that this rank did not have is a Pair, or plain.
            own = type(parameter.grad) is type(parameter) or (kind != "pair" and i == 4)
            check(i < 2 or own, f"{what}: {parameter.grad}")
            for j, actual in enumerate(inner(parameter.grad)):
                average = expected[i][j] + (before[i][j].double() if before[i] else 0)
                check_near(actual, average, what, 1e-5)
        grads = [p.grad for p in parameters if p.grad is not None]
        check_same_on_all_ranks([t for g in grads for t in inner(g)], f"step {step}")
        optimizer.step()
        check_same_on_all_ranks([t for p in parameters for t in inner(p)], f"weights {step}")


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"delay_allreduce": True, "message_size": 10_000_000},
    {"check_finite": True, "gradient_predivide_factor": 2.0},
]


@pytest.mark.parametrize("kind", WRAPS)
def test_subclass_parameters_train_to_the_averages(ranks: RankPool, kind: str) -> None:
    ranks.run(2, _all_options, kind)


def _other_form(rank: int, world: int) -> None:
    model = Two("pair")
    ddp = DistributedDataParallel(model)

    def step(number: int) -> None:
        ddp.zero_grad()
        torch.autograd.backward(ddp(data(rank, number, 6, 4), False))

    step(0)
    if rank == 1:
        hook = model.weight.register_hook(lambda grad: grad.a)
    text = "'weight' is one tensor, but was recorded as several" if rank == 1 else "rank 1"
    with raises(RuntimeError, text):
        step(1)
    if rank == 1:
        hook.remove()
    step(2)
    check_same_on_all_ranks(inner(model.weight.grad), "after the error")


def test_subclass_gradient_of_another_form_is_an_error_that_names_it(ranks: RankPool) -> None:
    ranks.run(2, _other_form)


class Adapted(nn.Module):
    """A frozen quantized weight and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(Quantized.of(torch.randn(3, 4)), requires_grad=False)
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base) + self.up(self.down(x))


def _adapter(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = Adapted()
    ddp = DistributedDataParallel(model, message_size=7)
    check_same_on_all_ranks(inner(model.base), "the quantized weight")
    trained = [model.down.weight, model.up.weight]
    for step in range(2):
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in trained]
        for r in range(world):
            down, up = (p.detach().double().requires_grad_() for p in trained)
            x = data(r, step, 6, 4).double()
            y = F.linear(x, model.base.value().double()) + F.linear(F.linear(x, down), up)
            y.square().sum().backward()
            sums = [s + p.grad / world for s, p in zip(sums, (down, up), strict=True)]
        ddp.zero_grad()
        ddp(data(rank, step, 6, 4)).square().sum().backward()
        for p, average in zip(trained, sums, strict=True):
            check_near(p.grad, average, f"step {step}", 1e-5)
        check_same_on_all_ranks([p.grad for p in trained], f"step {step}")


def test_subclass_quantized_base_weight_is_rank_0s_under_an_adapter(ranks: RankPool) -> None:
    ranks.run(2, _adapter)


class Buffered(nn.Module):
    """Buffers of every supported kind, with different values on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("opaque", Wrapper(torch.randn(3)))
        self.register_buffer("open", OpenWrapper(torch.randn(3)))
        self.register_buffer("pair", Pair(torch.randn(3), torch.randn(2, 3)[0]))
        self.register_buffer("quantized", Quantized.of(torch.randn(3, 4)))
        self.register_buffer("expanded", torch.randn(3, 1).expand(3, 5))
        self.register_buffer("shifted", torch.randn(2, 1, 3).expand(2, 4, 3).transpose(0, 2))

    def values(self) -> list[Tensor]:
        return [t for b in self.buffers() for t in inner(b)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _buffers(rank: int, world: int) -> None:
    model = Buffered(rank)
    kept = [t.stride() for t in model.values()]
    first = [t.clone() for t in Buffered(0).values()]
    ddp = DistributedDataParallel(model, broadcast_buffers=True)
    for step in range(3):
        for value, expected in zip(model.values(), first, strict=True):
            check_equal(value, expected, f"step {step}")
        check_equal([t.stride() for t in model.values()], kept, "strides")
        for tensor in model.values():  # in place, differently on each rank
            base = tensor._base if tensor._base is not None else tensor
            base.copy_(torch.full_like(base, rank + step + 1))
        first = [torch.full_like(t, step + 1) for t in first]
        ddp(data(rank, step, 6, 4)).sum().backward()


def test_subclass_and_expanded_buffers_are_rank_0s_before_each_forward(ranks: RankPool) -> None:
    ranks.run(2, _buffers)


def _large(rank: int, world: int) -> None:
    """Larger than the tensors that are received directly in one piece."""
    values = [
        Wrapper(torch.full((1 << 19,), float(rank))),
        torch.full((1,), float(rank)).expand(1 << 19),
    ]
    module = nn.Module()
    for i, value in enumerate(values):
        module.register_parameter(f"p{i}", nn.Parameter(value, requires_grad=False))
    Reducer(module)
    for parameter in module.parameters():
        for tensor in inner(parameter):
            check_equal(tensor, torch.zeros(1 << 19), "rank 0's")


def test_subclass_parameters_of_a_reducer_are_rank_0s(ranks: RankPool) -> None:
    ranks.run(2, _large)


# --- other parts of the package ---


def _steps(optimizer_of: Callable[[list[nn.Parameter]], Any], kind: str | None, rank: int) -> Any:
    """The weights after three steps on two ranks. `kind` None means plain tensors."""
    torch.manual_seed(3)
    values = torch.randn(3, 4)
    layer = nn.Linear(4, 3, bias=False)
    layer.weight = nn.Parameter(values.clone() if kind is None else WRAPS[kind](values.clone()))
    ddp = DistributedDataParallel(layer)
    optimizer = optimizer_of([layer.weight])
    for step in range(3):
        optimizer.zero_grad()
        ddp(data(rank, step, 6, 4)).square().sum().backward()
        optimizer.step()
    return inner(layer.weight)[0]


OPTIMIZERS = {
    "adam": lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1),
    "sgd": lambda p: FusedSGD(p, lr=0.1, momentum=0.9),
    "lamb": lambda p: FusedLAMB(p, lr=0.1),
    "larc": lambda p: LARC(FusedSGD(p, lr=0.1, momentum=0.9)),
    "torch_adam": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def _optimizers(rank: int, world: int) -> None:
    for name, optimizer in OPTIMIZERS.items():
        expected = _steps(optimizer, None, rank)
        for kind in ("opaque", "open"):
            check_near(_steps(optimizer, kind, rank), expected, f"{name} of {kind}", 1e-5)


def test_subclass_parameters_are_stepped_like_plain_ones(ranks: RankPool) -> None:
    ranks.run(2, _optimizers)


def _batch_norm(rank: int, world: int) -> None:
    norms = [SyncBatchNorm(3).double() for _ in range(2)]
    for name in ("running_mean", "running_var"):
        setattr(norms[0], name, OpenWrapper(getattr(norms[0], name).clone()))
    for name in ("weight", "bias"):
        setattr(norms[0], name, nn.Parameter(OpenWrapper(getattr(norms[0], name).detach().clone())))
    grads = []
    for norm in norms:
        x = data(rank, 0, 5, 3).double().requires_grad_()
        y = norm(x)
        plain(y.square().sum()).backward() if norm is norms[1] else y.square().sum().backward()
        grads.append(
            [x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]
        )
    for i, (wrapped, expected) in enumerate(zip(*grads, strict=True)):
        check_near(plain(wrapped), expected, f"result {i}", 1e-9)


def test_subclass_parameters_and_statistics_of_sync_batch_norm(ranks: RankPool) -> None:
    ranks.run(2, _batch_norm)


# --- what cannot be synchronized ---


def _bad(kind: str) -> Tensor:
    values = torch.randn(3, 4)
    if kind == "sparse":
        return values.to_sparse()
    if kind == "quantized":
        return torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)
    if kind == "meta":
        return values.to("meta")
    if kind == "dtensor":
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        from torch.distributed import tensor

        return tensor.distribute_tensor(values, mesh, [tensor.Shard(0)])
    if kind == "broken":
        return type("Broken", (Quantized,), {"__tensor_flatten__": None})(
            torch.zeros(3, 4, dtype=torch.int8), torch.ones(3, 1)
        )
    raise AssertionError(kind)


CAUSES = {
    "sparse": "layout is Sparse",
    "quantized": "dtype is quantized (QInt8)",
    "meta": "on the meta device",
    "dtensor": "DTensor",
    "broken": "of a quantized tensor",
}


def _refused(rank: int, world: int, on: list[int]) -> None:
    for kind, where in BAD:
        _refuses(rank, world, kind, where, on)
    # No rank waits for another, and the group can still be used.
    good = DistributedDataParallel(nn.Linear(4, 3))
    good(data(rank, 0, 6, 4)).sum().backward()
    check_same_on_all_ranks([p.grad for p in good.parameters()], "after the errors")


def _refuses(rank: int, world: int, kind: str, where: str, on: list[int]) -> None:
    bad = rank in on
    model = nn.Linear(4, 3)
    value = _bad(kind) if bad or kind == "dtensor" else torch.randn(3, 4)
    if not bad:
        value = torch.randn(3, 4)
    if where == "buffer":
        model.register_buffer("other", value)
    else:
        model.other = nn.Parameter(value, requires_grad=where == "trainable")
    if len(on) == world:
        what = "buffer" if where == "buffer" else "parameter"
        expected = raises(ValueError, f"rank {rank}: {what} 'other'", CAUSES[kind])
    else:
        expected = raises(RuntimeError, "rank 1's model differs from rank 0's", "other")
    with expected:
        DistributedDataParallel(model, broadcast_buffers=True)


BAD = [
    ("sparse", "frozen"), ("sparse", "buffer"), ("sparse", "trainable"), ("quantized", "frozen"),
    ("quantized", "buffer"), ("meta", "frozen"), ("meta", "trainable"), ("meta", "buffer"),
    ("dtensor", "frozen"), ("dtensor", "trainable"), ("dtensor", "buffer"), ("broken", "frozen"),
    ("broken", "buffer"),
]  # fmt: skip


@pytest.mark.parametrize("on", [[0, 1], [1]], ids=["all_ranks", "rank_1"])
def test_tensors_that_cannot_be_sent_are_refused_by_name_on_every_rank(
    ranks: RankPool, on: list[int]
) -> None:
    ranks.run(2, _refused, on)
