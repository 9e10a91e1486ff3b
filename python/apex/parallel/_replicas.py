# SPDX-License-Identifier: BSD-3-Clause
"""The state besides parameters that should be equal on all processes; see Note [Replicas] in
C++."""

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
    """The interface of a wrapper's engine."""

    process_group: dist.ProcessGroup | None

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The synchronized parameters."""

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The synchronized buffers."""

    def check_replicas_next(self) -> None:
        """Let the next backward compare all of the state of all ranks."""


class Replicas:
    """Lists the replicated state. An engine's reducer calls it; it holds the engine weakly.

    It includes only buffers of SyncBatchNorm, which the processes compute together. Other buffers
    may become different on each process at any time, by kernels that do not change version
    counters.
    """

    def __init__(self, engine: Holds) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> list[tuple[str, torch.Tensor, bool]]:
        """Names, tensors, and whether the values may differ."""
        engine = self._engine()
        if engine is None:
            return []
        together = _computed_together(engine.module, engine.process_group)
        return [
            *(
                (f"master weight of '{name}'", master, False)
                for name, _, master in _masters(engine)
            ),
            *(
                (f"buffer '{name}'", buffer, True)
                for name, buffer in engine.named_buffers()
                if name in together
            ),
        ]

    def taken_over(self) -> None:
        """Called when one process's values have been copied to all."""
        engine = self._engine()
        if engine is not None:
            for _, parameter, _ in _masters(engine):
                record_of(parameter).note_agreement(parameter)


class OnLoad:
    """Called before a module loads a state dict: the next backward then compares all of the state.

    A saved module must load without this package, and a copied one has another engine. So it is
    pickled and copied as a built-in function that takes any arguments and has no effect.
    """

    __slots__ = ("_engine",)

    def __init__(self, engine: Holds) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, *_: Any) -> None:
        engine = self._engine()
        if engine is not None:
            engine.check_replicas_next()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ("", "format")


def watch_loads(engine: Holds) -> None:
    """Register OnLoad with the module, until the engine is destroyed. Not if it is scripted."""
    if isinstance(engine.module, torch.jit.ScriptModule):
        return
    handle = engine.module._register_load_state_dict_pre_hook(OnLoad(engine))
    weakref.finalize(engine, handle.remove).atexit = False


def _masters(engine: Holds) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    return masters_of(engine.named_parameters())


def _computed_together(module: nn.Module, group: Any) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm)
        # torch's class, or this package's
        if getattr(part, "process_group", _NO_GROUP) in (None, group)
        for name in part._buffers
    }
