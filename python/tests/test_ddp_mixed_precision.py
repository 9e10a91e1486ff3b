# SPDX-License-Identifier: BSD-3-Clause
"""mixed_precision: tensors in forward and its recomputation, buffers, and inputs of any kind."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import build, data
from ddp_support import (
    RankPool,
    alone,
    check,
    check_equal,
    check_gradients,
    check_near,
    check_same_on_all_ranks,
    gradients,
    mean_over_ranks,
    raises,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from apex.parallel import DistributedDataParallel
from apex.parallel._mixed_precision import Casts, _cast

pytestmark = pytest.mark.processes

NARROW = torch.bfloat16


def policy(**others: Any) -> SimpleNamespace:
    dtypes = {"param_dtype": NARROW, "reduce_dtype": torch.float32, "buffer_dtype": None}
    return SimpleNamespace(**{**dtypes, **others})


def _own(module: nn.Module) -> dict[str, int]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: id(tensor) for name, tensor in tensors}


def _check_own(module: nn.Module, own: dict[str, int], what: str) -> None:
    check_equal(_own(module), own, f"{what}: the module's own tensors")
    dtypes = {p.dtype for p in [*module.parameters(), *module.buffers()] if p.is_floating_point()}
    check_equal(dtypes, {torch.float32}, f"{what}: dtypes")


# --- activation checkpointing ---


class Segments(nn.Module):
    """Two checkpointed segments: a module, and a function that uses weights without their
    modules."""

    def __init__(self, reentrant: bool | None, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), norm(6))
        self.last = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((6,), 1.5))
        self.reentrant = reentrant

    def _end(self, x: Tensor) -> Tensor:
        x = torch.sin(x) * self.scale.to(x.dtype)
        return nn.functional.linear(x, self.last.weight, self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in (self.middle, self._end):
            if self.reentrant is None:
                x = part(x)
            else:
                x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step, 5, 4)).float().square().sum()


def _checkpoints(rank: int, world: int, reentrant: bool, buffers: torch.dtype | None) -> None:
    options = {"mixed_precision": policy(buffer_dtype=buffers), "message_size": 20}
    norm = nn.LayerNorm if buffers is None else nn.BatchNorm1d  # with statistics of one dtype
    plain = DistributedDataParallel(build(lambda: Segments(None, norm)), **options)
    model = build(lambda: Segments(reentrant, norm))
    own = _own(model)
    ddp = DistributedDataParallel(model, **options)
    for step in range(3):
        plain.zero_grad()
        ddp.zero_grad()
        expected, loss = _loss(plain, rank, step), _loss(ddp, rank, step)
        _check_own(model, own, "after forward")
        expected.backward(retain_graph=True)
        loss.backward(retain_graph=step == 1)
        _check_own(model, own, "after backward")
        if step == 1:  # a second backward on the same graph
            expected.backward()
            loss.backward()
            _check_own(model, own, "after another backward")
        for name, grad in gradients(plain).items():
            check_near(gradients(ddp)[name], grad, f"{name}, step {step}", 1e-6)
            check_equal(gradients(ddp)[name].dtype, torch.float32, name)
        check_same_on_all_ranks([p.grad for p in ddp.parameters()], f"step {step}")


@pytest.mark.parametrize("buffers", [None, NARROW], ids=["own_buffers", "narrow_buffers"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not_reentrant", "reentrant"])
def test_mixed_precision_checkpointed_segments_see_the_casts_again(
    ranks: RankPool, reentrant: bool, buffers: torch.dtype | None
) -> None:
    ranks.run(2, _checkpoints, reentrant, buffers)


def _checkpoints_wrapper(rank: int, world: int, reentrant: bool) -> None:
    options = {"mixed_precision": policy(), "message_size": 20}
    plain = DistributedDataParallel(build(lambda: Segments(None)), **options)
    model = build(lambda: Segments(None))
    own = _own(model)
    ddp = DistributedDataParallel(model, **options)
    for step in range(3):
        plain.zero_grad()
        ddp.zero_grad()
        _loss(plain, rank, step).backward()
        x = data(rank, step, 5, 4).requires_grad_()
        checkpoint(ddp, x, use_reentrant=reentrant).float().square().sum().backward()
        _check_own(model, own, "after backward")
        for name, grad in gradients(plain).items():
            check_near(gradients(ddp)[name], grad, f"{name}, step {step}", 1e-6)
    check_equal(ddp.statistics()["backwards"], 3, "backwards of the first engine")


@pytest.mark.parametrize("reentrant", [False, True], ids=["not_reentrant", "reentrant"])
def test_mixed_precision_checkpointed_wrapper_averages(ranks: RankPool, reentrant: bool) -> None:
    ranks.run(2, _checkpoints_wrapper, reentrant)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(4))
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.where == "forward":
            self.seen = self.seen + 1
            raise ArithmeticError("on purpose")
        return self.last(_Raises.apply(x) if self.where == "backward" else x)


def _fails(rank: int, world: int, where: str) -> None:
    model = build(Fails)
    own = _own(model)
    ddp = DistributedDataParallel(model, mixed_precision=policy(buffer_dtype=NARROW))
    _loss(ddp, rank).backward()
    model.where = where
    with raises(ArithmeticError, "on purpose"):
        _loss(ddp, rank).backward()
    if where == "backward":
        _check_own(model, own, "after the exception")
    else:
        check_equal(model.first.weight.dtype, torch.float32, "dtype after the exception")
    model.where = ""
    _loss(ddp, rank).backward()
    check(model.first.weight.grad is not None, "no gradient after the exception")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_mixed_precision_exception_leaves_the_modules_own_tensors(
    ranks: RankPool, where: str
) -> None:
    ranks.run(2, _fails, where)


# --- buffers ---


class Averaging(nn.Module):
    """Buffers that forward assigns, changes in place, does not change, and removes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("assigned", torch.zeros(3))
        self.register_buffer("changed", torch.zeros(3))
        self.register_buffer("kept", torch.full((3,), 1.0 + 2.0**-20))
        self.register_buffer("grown", torch.zeros(1))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("first_only", torch.zeros(2))
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        mean = y.detach().mean(0)
        self.dtypes = {self.assigned.dtype, self.changed.dtype, self.kept.dtype}
        self.assigned = 0.5 * self.assigned + mean.to(self.assigned.dtype)
        self.changed.mul_(0.5).add_(mean)
        self.grown = torch.cat([self.grown, self.grown.new_ones(1)])
        self.steps = self.steps + 1
        self.first_only = None
        return y * self.kept


def _buffers(rank: int, world: int) -> None:
    model = build(Averaging)
    ddp = DistributedDataParallel(model, mixed_precision=policy(buffer_dtype=NARROW))
    expected = torch.zeros(3)
    for step in range(4):
        with torch.no_grad():
            y = nn.functional.linear(
                data(rank, step, 5, 4).to(NARROW), model.layer.weight.to(NARROW),
                model.layer.bias.to(NARROW),
            )  # fmt: skip
        expected = (0.5 * expected.to(NARROW) + y.mean(0)).float()
        context = torch.no_grad() if step == 3 else torch.enable_grad()
        with context:
            ddp(data(rank, step, 5, 4))
        check_equal(model.dtypes, {NARROW}, "dtypes in forward")
        check_near(model.assigned, expected, f"assigned, step {step}", 1e-2)
        check_near(model.changed, expected, f"changed, step {step}", 1e-2)
        check_equal(model.kept, torch.full((3,), 1.0 + 2.0**-20), "not changed")
        check_equal(model.grown, torch.tensor([0.0] + [1.0] * (step + 1)), "of another shape")
        check_equal(model.steps.item(), step + 1, "an integer")
        check(model.first_only is None, "what forward has removed is back")
        check_equal({b.dtype for b in model.buffers()}, {torch.float32, torch.int64}, "dtypes")


def test_mixed_precision_buffers_that_forward_assigns_keep_their_values(ranks: RankPool) -> None:
    ranks.run(2, _buffers)


class Ema(nn.Module):
    """A buffer that forward assigns in a segment that may be checkpointed."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.checkpointed = checkpointed
        self.register_buffer("ema", torch.zeros(3))
        self.register_buffer("table", torch.full((4,), 1.0 + 2.0**-20))
        self.fails = False

    def segment(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.ema = 0.5 * self.ema + y.detach().mean(0).to(self.ema.dtype)
        return torch.tanh(y) * self.ema

    def forward(self, x: Tensor) -> Tensor:
        self.table[0] = 3.0
        if self.checkpointed:
            y = checkpoint(self.segment, x, use_reentrant=False)
        else:
            y = self.segment(x)
        if self.fails:
            raise RuntimeError("forward fails")
        return y


def _assigned(rank: int, world: int, checkpointed: bool, broadcast_buffers: bool) -> None:
    """Compare with a module whose forward casts manually, and whose buffers are float32."""
    model = build(lambda: Ema(checkpointed))
    reference = copy.deepcopy(model)
    ddp = DistributedDataParallel(
        model, mixed_precision=policy(buffer_dtype=NARROW), broadcast_buffers=broadcast_buffers
    )
    for step in range(4):
        x = data(rank, step, 5, 4)
        before = reference.ema
        weight, bias = reference.layer.weight.to(NARROW), reference.layer.bias.to(NARROW)
        y = nn.functional.linear(x.to(NARROW), weight, bias)
        reference.ema = (0.5 * before.to(NARROW) + y.detach().mean(0)).float()
        model.fails = step == 2
        if model.fails:
            with raises(RuntimeError, "forward fails"):
                ddp(x)
        else:
            output = ddp(x)
            check_equal(model.ema, reference.ema, f"after forward {step}")
            output.float().sum().backward()
        check_equal(model.ema.dtype, torch.float32, f"dtype, step {step}")
        check_equal(model.ema, reference.ema, f"after step {step}")
        table = torch.tensor([3.0] + [1.0 + 2.0**-20] * 3)
        check_equal(model.table, table, "elements that forward has left alone")
        if broadcast_buffers:  # the next forward begins with rank 0's
            dist.broadcast(reference.ema, 0)


@pytest.mark.parametrize("broadcast_buffers", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_mixed_precision_assigned_buffers_survive_backward(
    ranks: RankPool, checkpointed: bool, broadcast_buffers: bool
) -> None:
    ranks.run(2, _assigned, checkpointed, broadcast_buffers)


# --- sparse gradients, and parameters of other kinds ---


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x))


def _sparse(rank: int, world: int) -> None:
    indices = torch.tensor([[1, 2, 2], [3, 2, 4]])
    model = build(Table)
    plain = copy.deepcopy(model).to(NARROW)
    expected = mean_over_ranks([
        alone(plain, lambda m, r=r: m(indices[r]).float().square().sum()) for r in range(world)
    ])  # fmt: skip
    ddp = DistributedDataParallel(model, mixed_precision=policy())
    for step in range(3):
        ddp.zero_grad()
        ddp(indices[rank]).float().square().sum().backward()
        grad = model.table.weight.grad
        check(grad.is_sparse and grad.dtype == torch.float32, f"{grad.layout}, {grad.dtype}")
        check_gradients(ddp, expected, f"step {step}", 2e-2)
        check_same_on_all_ranks([p.grad for p in ddp.parameters()], f"step {step}")


def test_mixed_precision_sparse_embedding_averages(ranks: RankPool) -> None:
    ranks.run(2, _sparse)


# --- the cast of a parameter ---


def _cast_in(weight: nn.Parameter) -> Tensor:
    layer = nn.Linear(2, 3, bias=False)
    layer.weight = weight
    casts = Casts(layer, NARROW, None)
    casts.put_in()
    return layer.weight


def test_cast_of_a_parameter_is_a_node_of_the_library() -> None:
    assert "apex::amp" in _cast_in(nn.Parameter(torch.ones(3, 2))).grad_fn.name()


def test_cast_within_transforms_of_torch_func_has_their_gradient() -> None:
    def loss(weight: Tensor) -> Tensor:
        return _cast(weight, NARROW).square().sum()

    weights = torch.arange(12.0).view(2, 3, 2)
    torch.testing.assert_close(torch.func.grad(loss)(weights[0]), 2 * weights[0])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(weights), 2 * weights)


def test_cast_of_a_dual_tensor_has_its_tangent() -> None:
    with torch.autograd.forward_ad.dual_level():
        weight = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.full((3,), 2.0))
        tangent = torch.autograd.forward_ad.unpack_dual(_cast(weight, NARROW)).tangent
    assert tangent is not None and tangent.dtype == NARROW and bool((tangent == 2).all())


class Named(Tensor):
    pass


def test_cast_of_a_tensor_subclass_keeps_its_class() -> None:
    weight = nn.Parameter(torch.ones(3, 2).as_subclass(Named))
    cast = _cast_in(weight)
    assert type(cast) is Named and cast.dtype == NARROW
    cast.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


# --- inputs ---

Pair = namedtuple("Pair", ["x", "label"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    label: str
    derived: int = dataclasses.field(init=False, default=3)


class Entries(OrderedDict):
    def __init__(self, x: Tensor, label: str) -> None:
        super().__init__(x=x)
        self.label = label


INPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "defaultdict": (lambda x: defaultdict(list, x=[x]), lambda i: i["x"][0]),
    "dict_subclass": (lambda x: Entries(x, "kept"), lambda i: i["x"]),
    "namedtuple": (lambda x: Pair(x, "kept"), lambda i: i.x),
    "dataclass": (lambda x: Frozen(x, "kept"), lambda i: i.x),
}


class Takes(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layer = nn.Linear(4, 2)
        self.seen: Any = None

    def forward(self, given: Any, *, more: Any) -> Tensor:
        self.seen = (given, more)
        take = INPUTS[self.name][1]
        return self.layer(take(given)) + self.layer(take(more[0]))


def _takes(rank: int, world: int, name: str) -> None:
    make, take = INPUTS[name]
    ddp = DistributedDataParallel(build(lambda: Takes(name)), mixed_precision=policy())
    given = make(data(rank))
    ddp(given, more=[given]).sum().backward()
    seen, (more,) = ddp.module.seen
    check(more is seen, "what was one container is two")
    check_equal(type(seen), type(given), "class")
    check_equal(take(seen).dtype, NARROW, "dtype")
    check_equal(take(given).dtype, torch.float32, "dtype of what was given")
    for label in ("label", "default_factory", "derived"):
        check_equal(getattr(seen, label, None), getattr(given, label, None), label)


@pytest.mark.parametrize("name", INPUTS)
def test_mixed_precision_casts_within_containers_of_any_class(ranks: RankPool, name: str) -> None:
    ranks.run(2, _takes, name)
