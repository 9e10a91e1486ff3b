# SPDX-License-Identifier: BSD-3-Clause
"""Tensors in nested containers: finding them, and putting others in their place."""

from __future__ import annotations

import copy
import dataclasses
import operator
import types
from collections import deque
from collections.abc import Callable, Mapping, MutableSequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

#: What has no tensors in it that count. A module inside an output is not an output.
_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range, type, torch.dtype,
    torch.device, nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType,
)  # fmt: skip

_Parts = tuple[list[Any], Callable[[list[Any]], Any]]


def _parts(value: Any, movable: bool = True) -> _Parts | None:
    """The items of a container, and what makes one like it of others; None for anything else.

    Containers are those that torch's pytree knows, those of a script's own that are registered
    there, and what pytree does not know: subclasses of the built-in ones, mappings and sequences of
    any class, and dataclasses (if not `movable`, those without a method ``to`` of their own). A new
    one has the class and the attributes of the old.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return list(value), kind
    if isinstance(value, PackedSequence):  # its batch sizes have to stay on the CPU
        items = [value.data, value.sorted_indices, value.unsorted_indices]
        return items, lambda new: PackedSequence(new[0], value.batch_sizes, new[1], new[2])
    if isinstance(value, (tuple, frozenset, set)):
        return list(value), lambda new: _with_attributes(value, new)
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        children, context = node.flatten_fn(value)
        return list(children), lambda new: node.unflatten_fn(new, context)
    if isinstance(value, types.MappingProxyType):
        return list(value.values()), lambda new: kind(dict(zip(value, new, strict=True)))
    if isinstance(value, Mapping):
        return [value[key] for key in value], lambda new: _with_items(value, list(value), new)
    if isinstance(value, (MutableSequence, deque)):
        return list(value), lambda new: _with_items(value, range(len(new)), new)
    if dataclasses.is_dataclass(value) and (movable or not hasattr(value, "to")):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [getattr(value, name) for name in names], lambda new: _with_fields(value, names, new)
    return None


def _with_items(value: Any, keys: Any, items: list[Any]) -> Any:
    """A copy with other items; a plain container where the class cannot be copied or written to."""
    try:
        try:
            result = copy.copy(value)
        except TypeError:  # copying calls the class, which needs arguments
            kind: Any = type(value)
            result = kind.__new__(kind)
            result.__dict__.update(value.__dict__)
        for key, item in zip(keys, items, strict=True):
            result[key] = item
    except (AttributeError, TypeError):
        return dict(zip(keys, items, strict=True)) if isinstance(value, Mapping) else items
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
    result = copy.copy(value)  # its __init__ does not run again
    for name, item in zip(names, items, strict=True):
        object.__setattr__(result, name, item)  # also where the class is frozen
    return result


def map_tensors(
    value: Any,
    change: Callable[[torch.Tensor], Any],
    change_other: Callable[[Any], Any] | None = None,
) -> Any:
    """``value`` with ``change(tensor)`` in the place of each tensor in nested containers.

    Containers keep their class; one in which nothing changes is returned itself. What is in several
    places is changed once. A container within itself is left as it is there. ``change_other`` is
    called for what is neither a tensor nor a container, and for a dataclass with a method ``to``.
    """
    results: dict[int, tuple[Any, Any]] = {}  # with the value, whose id must stay its own

    def mapped(value: Any) -> Any:
        known = results.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, torch.Tensor):
            result = change(value)
        elif isinstance(value, _LEAVES):
            return value
        else:
            results[id(value)] = (value, value)
            parts = _parts(value, movable=change_other is None)
            if parts is not None:
                items, make = parts
                new = [mapped(item) for item in items]
                result = value if all(map(operator.is_, new, items)) else make(new)
            else:
                result = value if change_other is None else change_other(value)
        results[id(value)] = (value, result)
        return result

    return mapped(value)


def find_tensors(value: Any, in_objects: bool = True) -> list[torch.Tensor]:
    """The tensors in ``value``, once each, in nested containers and in attributes of objects.

    Not in attributes if not ``in_objects``.
    """
    tensors: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # with the value, whose id must stay its own
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            if id(item) not in seen:
                seen[id(item)] = item
                tensors.append(item)
            continue
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen[id(item)] = item
        parts = _parts(item)
        if parts is not None:
            waiting.extend(parts[0])
        elif in_objects:
            waiting.extend(_attributes(item))
    return tensors


def _attributes(value: Any) -> list[Any]:
    found = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            found.append(getattr(value, name, None))
    return found
