# SPDX-License-Identifier: BSD-3-Clause
"""Records when the host runs forwards and optimizer steps of a wrapper, for overlap reports."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from apex._internal.optimizer_steps import taking_parts

FORWARD = "forward"
_KEPT = 1024


class Span(NamedTuple):
    """A time span of the host: ``"forward"``, or ``"step"`` with the optimizer's class."""

    name: str
    begin_s: float
    end_s: float


class Timeline:
    """Forwards of one wrapper, and steps of optimizers that hold its parameters.

    Times are from ``time.perf_counter()``, which on Linux is the clock of the C++ engine. A copy
    starts empty.
    """

    def __init__(self) -> None:
        self.parameters: Sequence[Tensor] = ()
        self._spans: deque[Span] = deque(maxlen=_KEPT)
        self._step_began: dict[int, float] = {}  # by id, which is valid while the optimizer steps
        _timelines.add(self)
        _register()

    def __reduce__(self) -> tuple[type[Timeline], tuple[()]]:
        return Timeline, ()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spans.append(Span(name, began, time.perf_counter()))

    def of_step(self, began_s: float, ended_s: float) -> list[Span]:
        """The spans around a backward, from the previous optimizer step to the next forward.

        The next forward is the first one from ``ended_s`` on. Times are relative to ``began_s``.
        """
        spans = sorted(self._spans, key=lambda span: span.begin_s)
        steps = [s.end_s for s in spans if s.name != FORWARD and s.end_s <= began_s]
        forwards = [s.begin_s for s in spans if s.name == FORWARD and s.begin_s >= ended_s]
        first, last = max(steps, default=-math.inf), min(forwards, default=math.inf)
        return [
            Span(s.name, s.begin_s - began_s, s.end_s - began_s)
            for s in spans
            if first <= s.begin_s < last
        ]

    def _steps(self, optimizer: Optimizer) -> None:
        mine = {id(parameter) for parameter in self.parameters}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self._step_began[id(optimizer)] = time.perf_counter()

    def _stepped(self, optimizer: Optimizer) -> None:
        began = self._step_began.pop(id(optimizer), None)
        if began is not None:
            name = f"step ({type(optimizer).__name__})"
            self._spans.append(Span(name, began, time.perf_counter()))


_timelines: weakref.WeakSet[Timeline] = weakref.WeakSet()


@functools.cache  # one pair of hooks for all wrappers
def _register() -> None:
    register_optimizer_step_pre_hook(_steps)
    register_optimizer_step_post_hook(_stepped)


def _steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or optimizer in taking_parts:
        return
    for timeline in _timelines:
        timeline._steps(optimizer)


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for timeline in _timelines:
        timeline._stepped(optimizer)
