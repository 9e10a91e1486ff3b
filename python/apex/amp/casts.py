"""Casting of arguments, nested as they come, and the cache of cast parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

LOW_PRECISION_DTYPES = (torch.float16, torch.bfloat16)


def is_low_precision(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is float16 or bfloat16."""
    return tensor.dtype in LOW_PRECISION_DTYPES


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply `function` to every tensor in `value`: nested lists, tuples, named tuples, dicts.

    Containers keep their type; anything else is returned as it is.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return value._replace(data=function(value.data))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(function, item) for item in value)
    if type(value) is dict:
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def floating_tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors in `values`, lists and tuples included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                yield value
        elif isinstance(value, (list, tuple)):
            yield from floating_tensors(value)


class CastCache:
    """Low-precision copies of float32 parameters, for one iteration.

    A copy is a differentiable cast, so gradients through any number of uses of it add up on the
    float32 parameter. Only what needs a gradient right now is kept: with gradients disabled, or
    for a frozen parameter, every use casts anew, so an evaluation between two training steps
    neither sees nor leaves a stale copy. A parameter written in place is cast anew, too.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[torch.Tensor, int, int, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget every copy."""
        self._entries.clear()

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
