# SPDX-License-Identifier: BSD-3-Clause
"""The cache of cast parameters."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import torch

#: A parameter, its version and address when it was cast, and the copy.
_Entry: TypeAlias = tuple[torch.Tensor, int, int, torch.Tensor]


class CastCache:
    """Low-precision copies of float32 parameters, for one iteration.

    A copy is a differentiable cast, so the gradients of all its uses accumulate on the float32
    parameter. Only parameters that currently need a gradient are cached. With gradients disabled,
    or for a frozen parameter, every use casts again. So an evaluation between two training steps
    neither uses nor leaves a stale copy.

    Note [Writes without a version change]
    A parameter whose version or address has changed is cast again. Fused optimizers and writes
    through ``.data``, NumPy and DLPack change neither. So the cache is cleared at the end of each
    backward pass (``wrap_backward`` in ``patch.py``) and at the step of any optimizer. In between,
    parameters are constant in every training loop.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        # The number of references that torch itself holds to a cast parameter depends on its
        # version.
        with torch.enable_grad():
            parameter = torch.nn.Parameter(torch.ones((), device="cpu"))
            entry = parameter, 0, 0, parameter.half()
        del parameter
        self._references_of_a_dropped = sys.getrefcount(entry[0])

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self, *_: Any) -> None:
        """Drop every copy. Takes any arguments, to serve as a hook."""
        self._entries.clear()

    def forget(self, parameter: torch.Tensor) -> None:
        """Drop the copy of `parameter`, if it exists."""
        self._entries.pop(id(parameter), None)

    def forget_dropped(self) -> None:
        """Drop copies of parameters that only the cache or a graph still references."""
        for key, entry in list(self._entries.items()):
            if sys.getrefcount(entry[0]) <= self._references_of_a_dropped:
                self._entries.pop(key, None)

    def cast(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `parameter` as `dtype`, from the cache if possible."""
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
        # Inside torch.func.functionalize or FakeTensorMode, it is of no use outside.
        if copy.requires_grad and type(copy) is torch.Tensor:
            self._entries[id(parameter)] = (parameter, version, address, copy)
        return copy


def _is_recording(parameter: torch.Tensor) -> bool:
    """Whether the cast must be recorded by an active trace or capture."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return parameter.is_cuda and torch.cuda.is_current_stream_capturing()
