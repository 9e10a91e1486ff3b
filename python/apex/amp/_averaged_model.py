# SPDX-License-Identifier: BSD-3-Clause
"""Makes ``torch.optim.swa_utils.AveragedModel`` average float32 values of models at O2.

torch averages ``parameters()`` in their own dtype, in which rounding loses the small steps of an
average. For models with master weights, a replacement of ``update_parameters`` averages the float32
values of both models and records the result as the float32 values of the averaged model.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from .._internal.dtypes import is_low_precision
from ._full_values import full_value, has_full_values, set_full_value


class _InFloat32:
    """A view of a module in which low-precision parameters and buffers are float32 copies."""

    def __init__(self, module: Any, copies: dict[int, tuple[Any, torch.Tensor]] | None = None):
        self._original = module
        tensors = itertools.chain(module.parameters(), module.buffers())
        self.copies = copies or {
            id(tensor): (tensor, full_value(tensor))
            for tensor in tensors
            if is_low_precision(tensor)
        }

    def parameters(self) -> Iterator[torch.Tensor]:
        return (self._copy(parameter) for parameter in self._original.parameters())

    def buffers(self) -> Iterator[torch.Tensor]:
        return (self._copy(buffer) for buffer in self._original.buffers())

    @property
    def module(self) -> _InFloat32:
        return _InFloat32(self._original.module, self.copies)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.copies.get(id(tensor), (tensor, tensor))[1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


_original = AveragedModel.update_parameters


@functools.wraps(_original)
@torch.no_grad()
def _update_parameters(self: Any, model: torch.nn.Module) -> None:
    if not has_full_values(self) and not has_full_values(model):
        _original(self, model)
        return
    averages = _InFloat32(self)
    _original(averages, _InFloat32(model))  # type: ignore[arg-type]
    for tensor, value in averages.copies.values():
        tensor.copy_(value)
        set_full_value(tensor, value)


def average_full_values() -> None:
    """Replace ``AveragedModel.update_parameters``. Further calls have no effect."""
    AveragedModel.update_parameters = _update_parameters  # type: ignore[method-assign]
