# SPDX-License-Identifier: BSD-3-Clause
"""The communication hooks of a DistributedDataParallel's reduction."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from apex import _core
from apex.parallel._comm_hook import RegisteredHook, make_runner

#: A script's hook, or the name of a built-in one.
CommHook = RegisteredHook | str


class Hooks:
    """The hooks registered with a wrapper. Each of its reducers gets all of them.

    Copies of the wrapper have the same communication hook, but no callback or optimizer.
    """

    timeline: Timeline | None = None  # while overlap is recorded
    comm_hook: CommHook | None = None
    _parameters: Sequence[nn.Parameter] = ()  # in the reducer's order

    def install(self, reducer: _core.Reducer, parameters: Sequence[nn.Parameter]) -> None:
        """Register all hooks with a new reducer of these parameters."""
        self._parameters = parameters
        if self.comm_hook is not None:
            self._install_comm_hook(reducer, self.comm_hook)

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

    def __getstate__(self) -> dict[str, Any]:
        kept = ("comm_hook", "timeline")
        state = {name: value for name, value in self.__dict__.items() if name in kept}
        return state
