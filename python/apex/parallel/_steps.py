# SPDX-License-Identifier: BSD-3-Clause
"""Tells the engine of optimizers' steps, by a hook that torch calls for every optimizer."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from apex import _core


@functools.cache  # one hook for all wrappers
def watch_optimizers() -> None:
    """Let every reducer know of the steps of optimizers that hold its parameters.

    A fused optimizer does not move the version counters of what it writes, and a step without
    gradients writes nothing, so the engine could not see either for itself.
    """
    register_optimizer_step_post_hook(_stepped)


# Those inside an OverlappedOptimizer, while it has them take a part of a step. How many parts there
# are may differ by rank, so only its own step counts.
taking_parts: weakref.WeakSet[Optimizer] = weakref.WeakSet()

# Not id(): that of an optimizer made for one step may be the next one's.
_numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count()


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():  # the call cannot be part of a graph
        return
    if optimizer in taking_parts:
        return
    # One of each group is enough: whoever owns it hears of the step.
    some = [group["params"][0] for group in optimizer.param_groups if group["params"]]
    number = _numbers.setdefault(optimizer, next(_next_number))
    _core.Reducer.optimizer_stepped(some, number)
