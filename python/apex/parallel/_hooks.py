# SPDX-License-Identifier: BSD-3-Clause
"""The communication hooks of a DistributedDataParallel's reduction."""

from __future__ import annotations

import weakref

from apex import _core
from apex.parallel._comm_hook import RegisteredHook, make_runner

#: A script's hook, or the name of a built-in one.
CommHook = RegisteredHook | str


class Hooks:
    """The hooks registered with a wrapper. Each of its reducers gets all of them.

    Copies of the wrapper have the same communication hook.
    """

    comm_hook: CommHook | None = None

    def install(self, reducer: _core.Reducer) -> None:
        """Register all hooks with a new reducer."""
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
