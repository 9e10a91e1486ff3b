"""Tensors within what a module takes and returns: one walker for changing and for finding them."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

#: What has no tensors in it that count. A module inside an output is not an output.
_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, nn.Module,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
)  # fmt: skip

_Parts = tuple[list[Any], Callable[[list[Any]], Any]]


def _parts(value: Any) -> _Parts | None:
    """The items of a container, and what makes one like it of others; None for anything else.

    Containers are those that torch's pytree knows, those of a script's own that are registered
    there, and subclasses of the built-in ones and dataclasses, which it does not know. A new one
    has the class and the attributes of the old.
    """
    if isinstance(value, PackedSequence):  # its batch sizes have to stay on the CPU
        items = [value.data, value.sorted_indices, value.unsorted_indices]
        return items, lambda new: PackedSequence(new[0], value.batch_sizes, new[1], new[2])
    if isinstance(value, (tuple, frozenset, set)):
        return list(value), lambda new: _with_attributes(value, new)
    at_root = iter((False,))
    items, spec = pytree.tree_flatten(value, is_leaf=lambda _: next(at_root, True))
    if not spec.is_leaf():
        return items, lambda new: pytree.tree_unflatten(new, spec)
    if isinstance(value, (dict, MutableMapping)):
        return list(value.values()), lambda new: _with_items(value, zip(value, new, strict=True))
    if isinstance(value, list):
        return list(value), lambda new: _with_items(value, enumerate(new))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [getattr(value, name) for name in names], lambda new: _with_fields(value, names, new)
    return None


def _with_items(value: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    try:
        result = copy.copy(value)
    except TypeError:  # copying calls the class, which needs arguments
        kind: Any = type(value)
        result = kind.__new__(kind)
        result.__dict__.update(value.__dict__)
    for key, item in list(items):
        result[key] = item
    return result


def _with_attributes(value: Any, items: list[Any]) -> Any:
    kind = type(value)
    base = next(base for base in (tuple, frozenset, set) if isinstance(value, base))
    if hasattr(kind, "n_sequence_fields"):  # as torch.max() returns; these are made of their items
        return kind(items)
    # Not by the class, which may be called with something else.
    result = base.__new__(kind, items)  # type: ignore[call-arg]
    if base is set:
        result.update(items)
    if hasattr(value, "__dict__"):
        result.__dict__.update(value.__dict__)
    return result


def _with_fields(value: Any, names: list[str], items: list[Any]) -> Any:
    result = copy.copy(value)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(result, name, item)  # also where the class is frozen
    return result


def map_tensors(
    value: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    change_other: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """``value`` with ``change(tensor)`` in the place of each tensor in nested containers.

    Containers keep their class; one in which nothing changes is returned itself. What is in several
    places is changed once. A container within itself is left as it is there. ``change_other`` is
    called for what is neither a tensor nor a container.
    """
    results: dict[int, tuple[Any, Any]] = {}  # with the value, whose id must stay its own

    def mapped(value: Any) -> Any:
        if isinstance(value, _LEAVES):
            return value
        if id(value) in results:
            return results[id(value)][1]
        results[id(value)] = (value, value)
        parts = None if isinstance(value, torch.Tensor) else _parts(value)
        if isinstance(value, torch.Tensor):
            result = change(value)
        elif parts is None:
            result = change_other(value)
        else:
            items, make = parts
            new = [mapped(item) for item in items]
            unchanged = all(now is before for now, before in zip(new, items, strict=True))
            result = value if unchanged else make(new)
        results[id(value)] = (value, result)
        return result

    return mapped(value)


def find_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, also in nested containers and attributes of objects, once each."""
    tensors: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # with the value, whose id must stay its own
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            tensors.append(item)
            continue
        if type(item) in (tuple, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(dict.values(item))
        else:
            parts = _parts(item)
            waiting.extend(_attributes(item) if parts is None else parts[0])
    return tensors


def _attributes(value: Any) -> list[Any]:
    found = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            found.append(getattr(value, name, None))
    return found
