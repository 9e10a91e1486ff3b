# SPDX-License-Identifier: BSD-3-Clause
"""What should be equal on all processes besides the parameters; see Note [Replicas] in C++."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

from apex.amp._full_values import masters_of, record_of


class Holds(Protocol):
    """The engine of a wrapper."""

    @property
    def module(self) -> nn.Module:
        """The wrapped one."""

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are synchronized."""


class Replicas:
    """Called by the reducer of an engine, which it does not keep alive."""

    def __init__(self, engine: Holds) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> list[tuple[str, torch.Tensor, bool]]:
        """Names, tensors, and whether they may differ: buffers often do."""
        engine = self._engine()
        if engine is None:
            return []
        return [
            *(
                (f"master weight of '{name}'", master, False)
                for name, _, master in masters_of(engine.module)
            ),
            *((f"buffer '{name}'", buffer, True) for name, buffer in engine.named_buffers()),
        ]

    def taken_over(self) -> None:
        """All have those of one process now."""
        engine = self._engine()
        if engine is not None:
            for _, parameter, _ in masters_of(engine.module):
                record_of(parameter).note_agreement(parameter)
