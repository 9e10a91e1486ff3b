# SPDX-License-Identifier: BSD-3-Clause
"""Reports optimizer steps to the engine, by torch's global optimizer hooks."""

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
    """A wrapper's engine: its parameters, and how many reducers it has created for them."""

    parameters: Sequence[torch.nn.Parameter]
    made: int


# Numbers instead of id(): a new engine may have the id() of a deleted one.
_next_number = itertools.count()
_engines: weakref.WeakKeyDictionary[Reduces, int] = weakref.WeakKeyDictionary()


def watch_optimizers(engine: Reduces) -> None:
    """Report the steps of optimizers that hold parameters of ``engine`` to its reducer.

    The engine cannot tell a step from a write by the script, which may differ by rank.
    """
    _engines.setdefault(engine, next(_next_number))
    _register()


@functools.cache  # one hook for all wrappers
def _register() -> None:
    register_optimizer_step_pre_hook(_steps)
    register_optimizer_step_post_hook(_stepped)


# Optimizers inside a ShardedOptimizer, of which only the step of the ShardedOptimizer counts.
taking_parts: weakref.WeakSet[Optimizer] = weakref.WeakSet()


#: The attribute of a master weight that is the parameter of the model.
MODEL_PARAMETER = "_apex_model_parameter"


class _Known(NamedTuple):
    state: tuple[Any, ...]  # of the optimizer and the engines when `some` was found
    some: list[torch.Tensor]


_known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()


def _updated_by(optimizer: Optimizer) -> list[torch.Tensor]:
    params = (p for group in optimizer.param_groups for p in group["params"])
    return [getattr(p, MODEL_PARAMETER, p) for p in params]


def _one_of_each(optimizer: Optimizer) -> list[torch.Tensor]:
    """One parameter per engine that ``optimizer`` holds. Passing all of them would cost more than a
    step."""
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
        held = {id(p): p for p in _updated_by(optimizer)}
        of_engines = [[held[id(p)] for p in e.parameters if id(p) in held][:1] for e in _engines]
        known = _known[optimizer] = _Known(state, [p for some in of_engines for p in some])
    return known.some


def _steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # Only steps inside a gradient hook are refused.
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() < 0:
        return
    _core.Reducer.optimizer_steps(_updated_by(optimizer))


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():  # the call cannot be part of a graph
        return
    if optimizer in taking_parts:
        return
    some = _one_of_each(optimizer)
    if some:
        _core.Reducer.optimizer_stepped(some)
