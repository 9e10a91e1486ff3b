# SPDX-License-Identifier: BSD-3-Clause
"""The hooks and callbacks of a DistributedDataParallel's reduction."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from apex import _core
from apex.parallel._comm_hook import RegisteredHook, make_runner, require_alive
from apex.parallel._timeline import Timeline

#: A script's hook, or the name of a built-in one.
CommHook = RegisteredHook | str


class ReducedBucket(NamedTuple):
    """The argument of a bucket callback."""

    index: int  # type: ignore[assignment]  # hides tuple.index()
    parameters: list[nn.Parameter]


class Hooks:
    """The hooks registered with a wrapper. Each of its reducers gets all of them.

    Copies of the wrapper have the same communication hook, but no callback or optimizer.
    """

    callback: Callable[[ReducedBucket], None] | None = None
    optimizer: Any = None  # the OverlappedOptimizer, if any
    timeline: Timeline | None = None  # while overlap is recorded
    comm_hook: CommHook | None = None
    _parameters: Sequence[nn.Parameter] = ()  # in the reducer's order

    def install(self, reducer: _core.Reducer, parameters: Sequence[nn.Parameter]) -> None:
        """Register all hooks with a new reducer of these parameters."""
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

    def set_comm_hook(self, reducer: _core.Reducer, comm_hook: CommHook) -> None:
        if self.comm_hook is not None:
            raise RuntimeError(
                "a communication hook is already registered, and a wrapper can have only one."
            )
        self._install_comm_hook(reducer, comm_hook)
        self.comm_hook = comm_hook  # the reducer looks it up here

    def _install_comm_hook(self, reducer: _core.Reducer, comm_hook: CommHook) -> None:
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
        """Let backward return while buckets are in flight, and notify `optimizer` of each
        bucket."""
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
        reference = weakref.ref(self)  # see Note [Weak references of the engine]

        def run(index: int, members: list[int]) -> None:
            hooks = require_alive(reference, "a bucket callback")
            bucket = ReducedBucket(index, [hooks._parameters[i] for i in members])
            if hooks.callback is not None:
                hooks.callback(bucket)
            if hooks.optimizer is not None:
                hooks.optimizer._bucket_arrived(bucket)

        reducer.set_bucket_callback(run)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("comm_hook", "timeline")
        state = {name: value for name, value in self.__dict__.items() if name in kept}
        return state
