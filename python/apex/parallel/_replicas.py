# SPDX-License-Identifier: BSD-3-Clause
"""What should be equal on all processes besides the parameters; see Note [Replicas] in C++."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from apex.amp._full_values import masters_of, record_of

_NO_GROUP = object()


class Holds(Protocol):
    """The engine of a wrapper."""

    process_group: dist.ProcessGroup | None

    @property
    def module(self) -> nn.Module:
        """The wrapped one."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that are synchronized."""

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are synchronized."""


class Replicas:
    """Called by the reducer of an engine, which it does not keep alive.

    Buffers are equal for ever if nobody writes them, and if processes compute them together, as
    SyncBatchNorm does. Others may be each process's own at any time.
    """

    def __init__(self, engine: Holds) -> None:
        self._engine = weakref.ref(engine)
        self._at_first = {name: _Written(buffer) for name, buffer in engine.named_buffers()}

    def __call__(self) -> list[tuple[str, torch.Tensor, bool]]:
        """Names, tensors, and whether they may differ."""
        engine = self._engine()
        if engine is None:
            return []
        at_first = self._at_first
        together, own = _unlike_constants(engine.module, engine.process_group)
        return [
            *(
                (f"master weight of '{name}'", master, False)
                for name, _, master in _masters(engine)
            ),
            *(
                (f"buffer '{name}'", buffer, True)
                for name, buffer in engine.named_buffers()
                if name in together
                or (name not in own and name in at_first and at_first[name].is_still(buffer))
            ),
        ]

    def taken_over(self) -> None:
        """All have those of one process now."""
        engine = self._engine()
        if engine is not None:
            for _, parameter, _ in _masters(engine):
                record_of(parameter).note_agreement(parameter)


def _masters(engine: Holds) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    return masters_of(engine.named_parameters())


class _Written:
    """Which tensor a buffer was, in which memory, and how often that had been written."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._tensor = weakref.ref(buffer)
        self._state = self._state_of(buffer)

    def is_still(self, buffer: torch.Tensor) -> bool:
        return self._tensor() is buffer and self._state == self._state_of(buffer)

    @staticmethod
    def _state_of(buffer: torch.Tensor) -> tuple[int, int]:
        version = -1 if buffer.is_inference() else buffer._version
        return version, buffer.data_ptr() if buffer.layout == torch.strided else 0


def _unlike_constants(module: nn.Module, group: Any) -> tuple[set[str], set[str]]:
    """Names of buffers that processes compute together; and that torch's kernels write, which does
    not count as a change of the tensor."""
    together: set[str] = set()
    own: set[str] = set()
    for prefix, part in module.named_modules():
        observes = type(part).__module__.startswith("torch.ao.")
        if not observes and not isinstance(part, nn.modules.batchnorm._NormBase):
            continue
        with_others = getattr(part, "process_group", _NO_GROUP) in (None, group)
        names = {f"{prefix}.{name}" if prefix else name for name in part._buffers}
        (together if with_others else own).update(names)
    return together, own
