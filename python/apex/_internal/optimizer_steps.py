# SPDX-License-Identifier: BSD-3-Clause
"""Tells the engine of optimizers' steps, by a hook that torch calls for every optimizer."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from apex import _core


class Reduces(Protocol):
    """The engine of a wrapper: its parameters, and how many reducers it has made of them."""

    parameters: Sequence[torch.nn.Parameter]
    made: int


# By a number: an engine may have the id() of one that is gone.
_next_number = itertools.count()
_engines: weakref.WeakKeyDictionary[Reduces, int] = weakref.WeakKeyDictionary()


def watch_optimizers(engine: Reduces) -> None:
    """Let the reducer of ``engine`` know of the steps of optimizers that hold its parameters.

    A fused optimizer does not move the version counters of what it writes, and a step without
    gradients writes nothing, so the engine could not see either for itself.
    """
    _engines.setdefault(engine, next(_next_number))
    _register()


@functools.cache  # one hook for all wrappers
def _register() -> None:
    register_optimizer_step_pre_hook(_steps)
    register_optimizer_step_post_hook(_stepped)


# Those inside an OverlappedOptimizer, while it has them take a part of a step. How many parts there
# are may differ by rank, so only its own step counts.
taking_parts: weakref.WeakSet[Optimizer] = weakref.WeakSet()

# Not id(): that of an optimizer made for one step may be the next one's.
_numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


class _Known(NamedTuple):
    state: tuple[Any, ...]  # of the optimizer and the engines when this was found
    some: list[torch.nn.Parameter]


_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()


def _one_of_each(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """For each engine one parameter that ``optimizer`` holds: all of them cost more than a step."""
    groups = optimizer.param_groups
    state = (
        *[
            (len(group["params"]), id(group["params"][0]) if group["params"] else 0)
            for group in groups
        ],
        *[(number, engine.made) for engine, number in _engines.items()],
    )
    known = _known.get(optimizer)
    if known is None or known.state != state:
        held = {id(p): p for group in groups for p in group["params"]}
        of_engines = [[held[id(p)] for p in e.parameters if id(p) in held][:1] for e in _engines]
        known = _known[optimizer] = _Known(state, [p for some in of_engines for p in some])
    return known.some


def _steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # Outside of backward this is one comparison: steps in a gradient's hook are what is refused.
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:
        return
    _core.Reducer.optimizer_steps([p for group in optimizer.param_groups for p in group["params"]])


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():  # the call cannot be part of a graph
        return
    if optimizer in taking_parts:
        return
    some = _one_of_each(optimizer)
    if some:
        number = _numbers.setdefault(optimizer, next(_next_number))
        _core.Reducer.optimizer_stepped(some, number)
