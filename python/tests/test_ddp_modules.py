# SPDX-License-Identifier: BSD-3-Clause
"""Modules compiled by torch.jit, as a whole or in part, and modules that return any type and take
any argument. Lazy modules are refused."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ddp_models import build, data
from ddp_support import (
    alone,
    check,
    check_equal,
    check_gradients,
    check_near,
    check_same_on_all_ranks,
    check_step,
    gradients,
    mean_over_ranks,
    on_ranks,
    raises,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def _nested() -> nn.Module:
    model = Net()
    model.first = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5))
    return model


def _child() -> nn.Module:
    model = _nested()
    model.first = torch.jit.script(model.first)
    return model


# The wrapped module, and the same without torch.jit, whose copies have no gradients.
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "script": (lambda: torch.jit.script(Net()), Net),
    "trace": (lambda: torch.jit.trace(Net(), torch.ones(3, 4)), Net),
    "child": (_child, _nested),
}


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step)).square().sum()


def _check_step(ddp: nn.Module, kind: str, rank: int, world: int, step: int) -> None:
    plain = build(KINDS[kind][1])
    plain.load_state_dict(ddp.module.state_dict())
    expected = mean_over_ranks([
        alone(plain, lambda m, r=r: _loss(m, r, step)) for r in range(world)
    ])  # fmt: skip
    ddp.zero_grad()
    _loss(ddp, rank, step).backward()
    check_gradients(ddp, expected, f"step {step}", 1e-5)
    check_same_on_all_ranks([p.grad for p in ddp.parameters()], f"step {step}")


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}],
                         ids=["copies", "views"])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_scripted_module_averages(
    rank: int, world: int, kind: str, options: dict[str, Any]
) -> None:
    model = build(KINDS[kind][0])
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    ddp = DistributedDataParallel(model, message_size=12, **options)
    check_same_on_all_ranks([p.data for p in ddp.parameters()], "parameters")
    for step in range(4):
        _check_step(ddp, kind, rank, world, step)
    check_equal(ddp.statistics()["plans_recorded"], 1, "plans")
    # Replacing a parameter of the scripted part is detected.
    part = model.first if kind != "child" else getattr(model.first, "0")
    part.weight = nn.Parameter(torch.full((5, 4), 0.1 + rank))
    ddp(data(rank))
    check_same_on_all_ranks([p.data for p in ddp.parameters()], "parameters, one replaced")
    check(bool((part.weight == 0.1).all()), "not rank 0's parameter")
    for step in range(2):
        _check_step(ddp, kind, rank, world, step)


class Lazy(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(x))


@on_ranks(2)
def test_lazy_module_not_initialized_raises_and_says_how_it_is(rank: int, world: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Lazy(nn.LazyLinear(5))
        statistics = nn.Sequential(nn.Linear(4, 5), nn.LazyBatchNorm1d(affine=False))
    with raises(RuntimeError, "'part.weight'", "one forward of the module"):
        DistributedDataParallel(model)
    with raises(RuntimeError, "'1.running_mean'", "one forward of the module"):
        DistributedDataParallel(statistics)
    model(data(0))
    statistics(data(0))
    check_step(DistributedDataParallel(model), _loss, "initialized")
    check_step(DistributedDataParallel(statistics), _loss, "initialized, with buffers")


Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Result:
    value: Tensor
    parts: dict[str, list[Tensor]]
    nothing: None = None


@dataclass(slots=True)
class Slotted:
    value: Tensor


class ModelOutput(OrderedDict):
    """Entries are also attributes, as in model libraries."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda y: y, lambda o: o),
    "dict": (lambda y: {"a": {"b": y}, "n": 3}, lambda o: o["a"]["b"]),
    "tuple": (lambda y: (None, (y, "text")), lambda o: o[1][0]),
    "list": (lambda y: [[y], 1.0], lambda o: o[0][0]),
    "namedtuple": (lambda y: Pair(None, y), lambda o: o.second),
    "dataclass": (lambda y: Result(y.detach(), {"p": [y]}), lambda o: o.parts["p"][0]),
    "slotted": (lambda y: Slotted(y), lambda o: o.value),
    "deque": (lambda y: deque([y], maxlen=5), lambda o: o[0]),
    "user_dict": (lambda y: UserDict(x=y), lambda o: o["x"]),
    "return_type": (lambda y: torch.sort(y), lambda o: o.values),
    "packed": (lambda y: pack_sequence([y]), lambda o: o.data),
    "model_output": (lambda y: ModelOutput(loss=None, logits=y), lambda o: o.logits),
}


class Returns(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layer = nn.Linear(4, 4)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, use: bool = True) -> Any:
        y = self.layer(x) if use else x * 1.0
        if self.name == "nothing":
            self.kept = y
            return None
        return OUTPUTS[self.name][0](y)


@pytest.mark.parametrize("name", [*OUTPUTS, "nothing"])
@on_ranks(2)
def test_outputs_of_every_form_average(rank: int, world: int, name: str) -> None:
    ddp = DistributedDataParallel(build(lambda: Returns(name)))
    take = (lambda o: ddp.module.kept) if name == "nothing" else OUTPUTS[name][1]
    kind = type(Returns(name)(data(rank)))
    for step in range(4):
        plain = copy.deepcopy(ddp.module.layer)
        used = [step == 3 or name == "nothing" or r == step % 2 for r in range(world)]
        expected = mean_over_ranks([
            alone(plain, lambda m, r=r, u=used: (m(data(r)) if u[r] else 0 * m(data(r))).sum())
            for r in range(world)
        ])  # fmt: skip
        ddp.zero_grad()
        # A rank that does not use the layer participates because its output is known.
        output = ddp(data(rank).requires_grad_(), used[rank])
        check(type(output) is kind, f"the output became {type(output)}")
        take(output).sum().backward()
        for key, grad in gradients(ddp.module.layer).items():
            check_near(grad, expected[key], f"{key}, step {step}", 1e-5)


@on_ranks(2)
def test_forward_passes_every_argument(rank: int, world: int) -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, *xs: Tensor, flip: bool, **more: Any) -> tuple[Any, ...]:
            return self.layer(xs[0]), flip, more

    ddp = DistributedDataParallel(Keywords())
    x = data(rank)
    out, flip, more = ddp(x, x, flip=True, other={"x": x})
    check(flip is True and more["other"]["x"] is x, "arguments did not arrive as they were")
    out.sum().backward()
