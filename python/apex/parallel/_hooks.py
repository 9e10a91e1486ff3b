# SPDX-License-Identifier: BSD-3-Clause
"""What a script hangs into the reduction of a DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from apex import _core
from apex.parallel._comm_hook import RegisteredHook, make_runner, require_alive
from apex.parallel._timeline import Timeline


class ReducedBucket(NamedTuple):
    """What a bucket callback is called with."""

    index: int  # type: ignore[assignment]  # hides tuple.index()
    parameters: list[nn.Parameter]


class Hooks:
    """What was registered with a wrapper; each of its reducers is given all of it.

    Copies of the wrapper have the same communication hook, no callback and no optimizer.

    Args:
        comm_hook: the built-in one that mixed precision needs; a script's takes its place.
    """

    callback: Callable[[ReducedBucket], None] | None = None
    optimizer: Any = None  # the OverlappedOptimizer, if there is one
    timeline: Timeline | None = None  # while overlap is recorded
    _parameters: Sequence[nn.Parameter] = ()  # as the reducer numbers them

    def __init__(self, comm_hook: str | None) -> None:
        self.comm_hook: RegisteredHook | str | None = comm_hook
        self._default = comm_hook

    def install(self, reducer: _core.Reducer, parameters: Sequence[nn.Parameter]) -> None:
        """Gives all of it to a new reducer of these parameters."""
        self._parameters = parameters
        if self.comm_hook is not None:
            self._install_comm_hook(reducer, self.comm_hook)
        if self.callback is not None or self.optimizer is not None:
            self._install_callback(reducer)
        if self.optimizer is not None:
            reducer.set_deferred(True)
        if self.timeline is not None:
            self.timeline.parameters = parameters
            reducer.record_overlap(True)

    def set_comm_hook(self, reducer: _core.Reducer, comm_hook: RegisteredHook | str) -> None:
        if self.comm_hook is not None and self.comm_hook != self._default:
            raise RuntimeError("a communication hook is registered already; there can be one.")
        self._install_comm_hook(reducer, comm_hook)
        self.comm_hook = comm_hook  # where the reducer finds it

    def _install_comm_hook(self, reducer: _core.Reducer, comm_hook: RegisteredHook | str) -> None:
        if isinstance(comm_hook, str):
            reducer.set_builtin_comm_hook(comm_hook)
        else:
            reducer.set_comm_hook(make_runner(weakref.ref(self)))

    def set_callback(
        self, reducer: _core.Reducer, callback: Callable[[ReducedBucket], None] | None
    ) -> None:
        self.callback = callback
        self._install_callback(reducer)

    def set_optimizer(self, reducer: _core.Reducer, optimizer: Any) -> None:
        """Lets backward return while buckets are on their way, and tells `optimizer` of each."""
        self.optimizer = optimizer
        self._install_callback(reducer)
        reducer.set_deferred(True)

    def record_overlap(self, reducer: _core.Reducer, on: bool) -> None:
        reducer.record_overlap(on)
        self.timeline = Timeline() if on else None
        if self.timeline is not None:
            self.timeline.parameters = self._parameters

    def _install_callback(self, reducer: _core.Reducer) -> None:
        if self.callback is None and self.optimizer is None:
            reducer.set_bucket_callback(None)
            return
        reference = weakref.ref(self)  # see Note [What the engine may hold]

        def run(index: int, members: list[int]) -> None:
            hooks = require_alive(reference, "a bucket callback")
            bucket = ReducedBucket(index, [hooks._parameters[i] for i in members])
            if hooks.callback is not None:
                hooks.callback(bucket)
            if hooks.optimizer is not None:
                hooks.optimizer._bucket_arrived(bucket)

        reducer.set_bucket_callback(run)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("comm_hook", "_default", "timeline")
        return {name: value for name, value in self.__dict__.items() if name in kept}
