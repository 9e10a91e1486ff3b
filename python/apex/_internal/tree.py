# SPDX-License-Identifier: BSD-3-Clause
"""Find and replace tensors in nested containers."""

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

#: Types that are not searched for tensors. A module inside an output is not part of the output.
_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range, type, torch.dtype,
    torch.device, nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType,
)  # fmt: skip

_Parts = tuple[list[Any], Callable[[list[Any]], Any]]


def _parts(value: Any, movable: bool = True) -> _Parts | None:
    """The items of a container, and a function that rebuilds it from new items.

    None if `value` is not a container. Containers are the types registered with torch's pytree
    (built-in ones or the script's own), subclasses of built-in containers, mappings and sequences
    of any class, and dataclasses. If not `movable`, dataclasses with a method ``to`` are excluded.
    The rebuilt container keeps the class and the attributes of the old one.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return list(value), kind
    if isinstance(value, PackedSequence):  # its batch sizes must stay on the CPU
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
    """A copy with new items; a plain container if the class cannot be copied or written to."""
    try:
        try:
            result = copy.copy(value)
        except TypeError:  # copying calls the constructor, which needs arguments
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
    if hasattr(kind, "n_sequence_fields"):  # a structseq, as torch.max() returns
        return kind(items)
    # Bypasses the constructor of the class, which may take other arguments.
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
    """A copy of ``value`` in which ``change(tensor)`` replaces each tensor in nested containers.

    Containers keep their class. A container in which nothing changes is returned as it is. An
    object that occurs several times is changed once. If a container contains itself, the inner
    occurrence is left unchanged. ``change_other`` is called for values that are neither tensors nor
    containers, and for dataclasses with a method ``to``.
    """
    results: dict[int, tuple[Any, Any]] = {}  # holds the value too, so that its id is not reused

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
    """The distinct tensors in ``value``, in nested containers and in attributes of objects.

    Attributes are searched only if ``in_objects``.
    """
    tensors: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # holds the value too, so that its id is not reused
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
