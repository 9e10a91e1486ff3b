"""Casting of arguments, nested as they come, and the cache of cast parameters."""

from __future__ import annotations

import collections
import copy
import dataclasses
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree

LOW_PRECISION_DTYPES = (torch.float16, torch.bfloat16)


def is_low_precision(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is float16 or bfloat16."""
    return tensor.dtype in LOW_PRECISION_DTYPES


def _items(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """What a container holds, and how to make another one of its type; None: no container.

    Those that torch.utils._pytree knows (torch's results, deques, classes registered by other
    libraries), named tuples, dataclasses without a method ``to`` of their own, and mappings,
    sequences and tuples of any other class.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return list(value), kind
    if isinstance(value, (str, bytes, bytearray, range, torch.nn.Module)):
        return None
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        children, context = node.flatten_fn(value)
        return list(children), lambda items: node.unflatten_fn(items, context)
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return list(value), lambda items: kind(*items)
        return list(value), lambda items: tuple.__new__(kind, items)
    if isinstance(value, types.MappingProxyType):
        return list(value.values()), lambda items: kind(dict(zip(value, items, strict=True)))
    if isinstance(value, Mapping):
        keys = list(value)
        return [value[key] for key in keys], lambda items: _copied(value, keys, items)
    if isinstance(value, (MutableSequence, collections.deque)):
        return list(value), lambda items: _copied(value, range(len(value)), items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "to"):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [getattr(value, name) for name in names], lambda items: _with(value, names, items)
    return None


def _with(original: Any, names: list[str], items: list[Any]) -> Any:
    """A copy of a dataclass with other fields; its ``__init__`` does not run again."""
    clone = copy.copy(original)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(clone, name, item)  # frozen ones, too
    return clone


def _copied(original: Any, keys: Iterable[Any], items: list[Any]) -> Any:
    """A copy of a mapping or sequence with other items; plain where that cannot be made."""
    try:
        clone = copy.copy(original)
        for key, item in zip(keys, items, strict=True):
            clone[key] = item
        return clone
    except (AttributeError, TypeError):
        return dict(zip(keys, items, strict=True)) if isinstance(original, Mapping) else items


def map_tensors(
    function: Callable[[torch.Tensor], Any],
    value: Any,
    other: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """Apply `function` to every tensor in `value`, and `other` to what is no container.

    Containers keep their type; one in which nothing changes is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    opened = _items(value)
    if opened is None:
        return other(value)
    items, rebuild = opened
    mapped = [map_tensors(function, item, other) for item in items]
    if all(map(operator.is_, mapped, items)):
        return value
    return rebuild(mapped)


def floating_tensors(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors in `value`, in containers of any class."""
    found: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            found.append(tensor)
        return tensor

    map_tensors(look, value)
    return found


#: A parameter, its version and address when it was cast, and the copy.
_Entry: TypeAlias = tuple[torch.Tensor, int, int, torch.Tensor]


class CastCache:
    """Low-precision copies of float32 parameters, for one iteration.

    A copy is a differentiable cast, so gradients through any number of uses of it add up on the
    float32 parameter. Only what needs a gradient right now is kept: with gradients disabled, or
    for a frozen parameter, every use casts again, so an evaluation between two training steps
    neither sees nor leaves a stale copy.

    Note [Writes that nobody sees]
    A parameter whose version or address has changed is cast again. But fused optimizers and writes
    through ``.data``, NumPy and DLPack change neither. So nothing is kept beyond the end of a
    backward pass (``wrap_backward`` in ``patch.py``) or the step of any optimizer, between which
    parameters are constant in every training loop.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        # How often torch itself refers to a parameter that has been cast differs by its version.
        with torch.enable_grad():
            parameter = torch.nn.Parameter(torch.ones(()))
            entry = parameter, 0, 0, parameter.half()
        del parameter
        self._references_of_a_dropped = sys.getrefcount(entry[0])

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self, *_: Any) -> None:
        """Forget every copy. Takes any arguments, to serve as a hook."""
        self._entries.clear()

    def forget(self, parameter: torch.Tensor) -> None:
        """Forget the copy of `parameter`, if there is one."""
        self._entries.pop(id(parameter), None)

    def forget_dropped(self) -> None:
        """Forget copies of parameters that only the cache, or a graph, still holds."""
        for key, entry in list(self._entries.items()):
            if sys.getrefcount(entry[0]) <= self._references_of_a_dropped:
                self._entries.pop(key, None)

    def cast(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `parameter` as `dtype`, from the cache where that is right."""
        if not parameter.requires_grad or not torch.is_grad_enabled() or _is_recording(parameter):
            return parameter.to(dtype)
        entry = self._entries.get(id(parameter))
        version, address = parameter._version, parameter.data_ptr()
        if entry is not None:
            source, old_version, old_address, copy = entry
            if (
                source is parameter
                and old_version == version
                and old_address == address
                and copy.dtype == dtype
            ):
                return copy
        copy = parameter.to(dtype)
        self._entries[id(parameter)] = (parameter, version, address, copy)
        return copy


def _is_recording(parameter: torch.Tensor) -> bool:
    """Whether the cast must become part of what is being traced or captured."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return parameter.is_cuda and torch.cuda.is_current_stream_capturing()
