# SPDX-License-Identifier: BSD-3-Clause
"""The traversal of inputs and outputs of modules: containers keep their class, cycles end."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree

from apex._internal.tree import find_tensors, map_tensors

X = torch.ones(2)
Y = torch.zeros(3, requires_grad=True)

Pair = namedtuple("Pair", ["first", "second"])


class NamedPair(Pair):
    """Its constructor takes other arguments."""

    def __new__(cls, text: str) -> NamedPair:
        return super().__new__(cls, X, text)


class Triple(tuple):
    def __new__(cls, a: Any, b: Any) -> Triple:
        triple = super().__new__(cls, (a, b, X))
        triple.label = "kept"
        return triple


class Items(list):
    label = "of the class"


class Output(OrderedDict):
    """Entries are also attributes, as in model libraries."""

    def __init__(self, *, first: Any, second: Any) -> None:
        super().__init__(first=first, second=second)
        self.label = "kept"

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Counts(dict):
    def __init__(self, needed: int) -> None:
        super().__init__(x=X)
        self.needed = needed


class Batch(UserDict):
    pass


class Recent(deque):
    pass


class Sealed(Mapping):
    """A read-only container."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclasses.dataclass
class Plain:
    value: Any
    derived: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass
class Movable:
    value: Any

    def to(self, device: str) -> str:
        return device


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    more: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    value: Any
    text: str = "kept"


class Registered:
    def __init__(self, *values: Any) -> None:
        self.values = values


pytree.register_pytree_node(
    Registered, lambda r: (list(r.values), None), lambda values, _: Registered(*values)
)


def _labelled() -> Items:
    items = Items([X, 3])
    items.label = "kept"
    return items


def _derived() -> Plain:
    plain = Plain([X])
    plain.derived = X
    return plain


CONTAINERS: dict[str, tuple[Any, Any]] = {  # the container, and how its first tensor is found
    "tuple": ((X, "text"), lambda c: c[0]),
    "list": ([None, [X]], lambda c: c[1][0]),
    "dict": ({"a": {"b": X}, 3: 4}, lambda c: c["a"]["b"]),
    "defaultdict": (defaultdict(list, a=[X]), lambda c: c["a"][0]),
    "ordered": (OrderedDict(z=1, a=X), lambda c: c["a"]),
    "counter": (collections.Counter(a=1), None),
    "deque": (deque([X], maxlen=5), lambda c: c[0]),
    "set": ({"text", X}, lambda c: next(t for t in c if isinstance(t, Tensor))),
    "frozenset": (frozenset([X]), lambda c: next(iter(c))),
    "namedtuple": (Pair(None, X), lambda c: c.second),
    "namedtuple_subclass": (NamedPair("text"), lambda c: c.first),
    "tuple_subclass": (Triple(1, 2), lambda c: c[2]),
    "list_subclass": (_labelled(), lambda c: c[0]),
    "dict_subclass": (Counts(3), lambda c: c["x"]),
    "user_dict": (Batch(x=X), lambda c: c["x"]),
    "user_list": (UserList([None, X]), lambda c: c[1]),
    "chain_map": (ChainMap({}, {"x": X}), lambda c: c["x"]),
    "mapping_proxy": (types.MappingProxyType({"x": X}), lambda c: c["x"]),
    "deque_subclass": (Recent([X], maxlen=2), lambda c: c[0]),
    "model_output": (Output(first=X, second=None), lambda c: c.first),
    "dataclass": (_derived(), lambda c: c.derived),
    "frozen": (Frozen([X], (X, 3)), lambda c: c.more[0]),
    "slotted": (Slotted({"x": X}), lambda c: c.value["x"]),
    "registered": (Registered(1, [X]), lambda c: c.values[1][0]),
    "return_type": (torch.max(torch.ones(2, 2), 0), lambda c: c.values),
    "size": (torch.Size([2, 3]), None),
}


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("name", CONTAINERS)
def test_map_tensors_keeps_the_class_and_what_else_is_there(name: str) -> None:
    container, first = CONTAINERS[name]
    result = map_tensors(container, _double)
    if first is None:
        assert result is container
        return
    assert type(result) is type(container) and result is not container
    assert first(result).dtype == torch.float64
    assert first(container).dtype == torch.float32
    for label in ("label", "default_factory", "maxlen", "needed", "text"):
        assert getattr(result, label, None) == getattr(container, label, None)
    if isinstance(container, dict):
        assert list(result) == list(container)
    # If nothing changes, the container itself is returned.
    assert map_tensors(container, lambda tensor: tensor) is container


@pytest.mark.parametrize("name", [n for n, (_, first) in CONTAINERS.items() if first is not None])
def test_find_tensors_finds_what_map_tensors_changes(name: str) -> None:
    changed: list[Tensor] = []
    map_tensors(CONTAINERS[name][0], lambda tensor: changed.append(tensor) or tensor)
    found = find_tensors(CONTAINERS[name][0])
    assert {id(t) for t in found} == {id(t) for t in changed} and found
    assert len(found) == len(changed)


def test_map_tensors_packed_sequence_leaves_batch_sizes() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(1), torch.ones(2)], enforce_sorted=False)
    result = map_tensors([packed], _double)[0]
    assert type(result) is type(packed) and result.data.dtype == torch.float64
    assert result.batch_sizes is packed.batch_sizes
    moved = map_tensors(packed, lambda tensor: tensor.to("meta"))
    assert moved.sorted_indices.is_meta and moved.data.is_meta and not moved.batch_sizes.is_meta


def test_map_tensors_shared_parts_stay_shared_and_cycles_end() -> None:
    inner = {"x": X}
    first, second, tensor = map_tensors([inner, inner, X], _double)
    assert first is second and first["x"] is tensor
    cycle: list[Any] = [X]
    cycle.append(cycle)
    result = map_tensors(cycle, _double)
    assert result[0].dtype == torch.float64 and isinstance(result[1], list)


def test_map_tensors_calls_change_other_for_what_is_no_container() -> None:
    class Other:
        def to(self, device: str) -> str:
            return device

    seen = map_tensors([Other(), "text", 3, nn.Linear(1, 1)], _double, lambda v: v.to("there"))
    assert seen[:3] == ["there", "text", 3] and isinstance(seen[3], nn.Linear)


def test_map_tensors_leaves_a_dataclass_with_to_to_change_other() -> None:
    assert map_tensors([Movable(X)], _double, lambda other: other.to("there")) == ["there"]
    assert map_tensors([Movable(X)], _double)[0].value.dtype == torch.float64


def test_map_tensors_mapping_that_cannot_be_written_to_becomes_a_plain_one() -> None:
    sealed = Sealed(x=X, n=1)
    result = map_tensors(sealed, _double)
    assert type(result) is dict and result["x"].dtype == torch.float64 and result["n"] == 1
    assert sealed["x"].dtype == torch.float32
    assert map_tensors(sealed, lambda tensor: tensor) is sealed


def test_find_tensors_outside_of_objects() -> None:
    class Held:
        value = [X]

    held = Held()
    held.own = Y
    assert find_tensors([held, {"x": X}]) == [X, Y]
    assert find_tensors([held, {"x": X}], in_objects=False) == [X]


class Node:
    """References every other node of its graph."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.others: list[Node] = []


def test_find_tensors_in_a_graph_of_objects_visits_each_once(monkeypatch: Any) -> None:
    from apex._internal import tree

    nodes = [Node(torch.ones(1)) for _ in range(40)]
    for node in nodes:
        node.others = nodes
        node.copy_of_others = list(nodes)
    visits = []
    real = tree._attributes
    monkeypatch.setattr(tree, "_attributes", lambda v: visits.append(v) or real(v))
    assert len(find_tensors(nodes[0])) == 40
    assert len(visits) == 40
    deep: Any = Y
    for _ in range(5000):
        deep = [deep]
    assert find_tensors(deep) == [Y]


def test_find_tensors_passes_over_modules_functions_and_classes() -> None:
    class Held:
        parameter = X  # an attribute of the class

        def __init__(self) -> None:
            self.module = nn.Linear(2, 2)
            self.library = torch
            self.function = find_tensors
            self.kind = Frozen
            self.value = Y

        def method(self) -> None: ...

    held = Held()
    held.bound = Held().method
    assert find_tensors(held) == [Y]

    class Slots:
        __slots__ = ("left", "right")

        def __init__(self) -> None:
            self.left = Y

    assert find_tensors(Slots()) == [Y]
