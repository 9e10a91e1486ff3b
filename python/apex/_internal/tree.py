# SPDX-License-Identifier: BSD-3-Clause
"""Find and replace tensors in nested containers: those of torch's pytree, mappings, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree


def _parts(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The items of a container, and a function that rebuilds it from new items; None if `value` is
    not a container."""
    kind = type(value)
    if isinstance(value, PackedSequence):  # its batch sizes must stay on the CPU
        items = [value.data, value.sorted_indices, value.unsorted_indices]
        return items, lambda new: PackedSequence(new[0], value.batch_sizes, new[1], new[2])
    if isinstance(value, tuple) and hasattr(kind, "_make"):  # a namedtuple
        return list(value), kind._make
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        children, context = node.flatten_fn(value)
        return list(children), lambda new: node.unflatten_fn(new, context)
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        return list(value.values()), lambda new: _with_items(value, new)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [getattr(value, name) for name in names], lambda new: _with_fields(value, names, new)
    return None


def _with_items(value: Any, items: list[Any]) -> Any:
    result = copy.copy(value)
    for key, item in zip(value, items, strict=True):
        result[key] = item
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

    ``change_other`` is called for values that are neither tensors nor containers, and for
    dataclasses with a method ``to``.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    movable = change_other is not None and dataclasses.is_dataclass(value) and hasattr(value, "to")
    parts = None if movable else _parts(value)
    if parts is None:
        return value if change_other is None else change_other(value)
    return parts[1]([map_tensors(item, change, change_other) for item in parts[0]])


def find_tensors(value: Any) -> list[torch.Tensor]:
    """The distinct tensors in ``value``, in nested containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    items, _ = _parts(value) or ([], None)
    found = [tensor for item in items for tensor in find_tensors(item)]
    return list({id(tensor): tensor for tensor in found}.values())
