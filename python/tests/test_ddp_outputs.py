# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel with modules that return any type and take any argument."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ddp_models import build, data
from ddp_support import alone, check, check_near, gradients, mean_over_ranks, on_ranks
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

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
