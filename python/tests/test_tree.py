# SPDX-License-Identifier: BSD-3-Clause
"""The traversal of inputs and outputs of modules: containers keep their class."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from apex._internal.tree import find_tensors, map_tensors

X = torch.ones(2)
Pair = namedtuple("Pair", ["first", "second"])


class Output(OrderedDict):
    """Entries are also attributes, as in model libraries."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Batch(UserDict):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    text: str = "kept"


@dataclasses.dataclass
class Movable:
    value: Any

    def to(self, device: str) -> str:
        return device


CONTAINERS: dict[str, tuple[Any, Any]] = {  # the container, and how its first tensor is found
    "tuple": ((X, "text"), lambda c: c[0]),
    "list": ([None, [X]], lambda c: c[1][0]),
    "dict": ({"a": {"b": X}, 3: 4}, lambda c: c["a"]["b"]),
    "defaultdict": (defaultdict(list, a=[X]), lambda c: c["a"][0]),
    "ordered": (OrderedDict(z=1, a=X), lambda c: c["a"]),
    "deque": (deque([X], maxlen=5), lambda c: c[0]),
    "namedtuple": (Pair(None, X), lambda c: c.second),
    "user_dict": (Batch(x=X), lambda c: c["x"]),
    "model_output": (Output(first=X), lambda c: c.first),
    "dataclass": (Frozen([X]), lambda c: c.value[0]),
    "return_type": (torch.max(torch.ones(2, 2), 0), lambda c: c.values),
}


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_mapped_and_searched(name: str) -> None:
    container, first = CONTAINERS[name]
    result = map_tensors(container, _double)
    assert type(result) is type(container)
    assert first(result).dtype == torch.float64 and first(container).dtype == torch.float32
    for label in ("default_factory", "maxlen", "text"):
        assert getattr(result, label, None) == getattr(container, label, None)
    assert any(tensor is first(container) for tensor in find_tensors(container))


def test_packed_sequence_keeps_its_batch_sizes() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(1), torch.ones(2)], enforce_sorted=False)
    moved = map_tensors([packed], lambda tensor: tensor.to("meta"))[0]
    assert type(moved) is type(packed) and moved.batch_sizes is packed.batch_sizes
    assert moved.sorted_indices.is_meta and moved.data.is_meta


def test_other_values_and_movable_dataclasses_are_given_to_change_other() -> None:
    move = lambda other: other.to("there") if hasattr(other, "to") else other  # noqa: E731
    assert map_tensors([Movable(X), "text", 3], _double, move) == ["there", "text", 3]
    assert map_tensors([Movable(X)], _double)[0].value.dtype == torch.float64
    module = nn.Linear(1, 1)
    assert map_tensors(module, _double) is module and find_tensors([X, {"x": X}, module]) == [X]
