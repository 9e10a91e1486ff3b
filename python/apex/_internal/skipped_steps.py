# SPDX-License-Identifier: BSD-3-Clause
"""Counts the steps that this process and all other ranks have skipped together."""

from __future__ import annotations

import weakref
from typing import Protocol

from apex import _core


class Engine(Protocol):
    """A wrapper with ``on_failure="skip"``, which skips steps."""

    reducer: _core.Reducer | None


engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def count() -> int:
    """The number of steps that the reducers of all engines of this process have skipped."""
    reducers = [engine.reducer for engine in list(engines)]
    return sum(int(one.statistics()["steps_skipped"]) for one in reducers if one is not None)
