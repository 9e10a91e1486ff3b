# SPDX-License-Identifier: BSD-3-Clause
"""Steps of random programs that end in another way than with averaged gradients: in an error on
every rank, or in a step that every rank skips. All gradients are None then."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from ddp_program_reference import Forward
from ddp_support import check
from torch import Tensor

#: A step has one of them at most.
ENDINGS = ("raises", "drop", "freeze_alone", "infinite")


def end(
    machine: Any,
    uid: int,
    args: dict[str, Any],
    forwards: list[Forward],
    micro: int,
    todo: list[Tensor] | None,
) -> None:
    if "raises" in args:
        _raise(machine, uid, args, forwards, micro)
    elif "drop" in args:
        _drop(machine, uid, args, forwards[0], micro, todo)
    else:
        _infinite(machine, uid, args, forwards, micro, todo)
    machine.forget_gradients()


def _raise(
    machine: Any, uid: int, args: dict[str, Any], forwards: list[Forward], micro: int
) -> None:
    """Ranks in ``raises`` raise in backward. The others raise too or skip the step, unless
    those ranks had sent everything. Then they may have their averages."""
    boom = args["raises"]
    how = {**args, "how": None}
    error: BaseException | None = None
    with contextlib.ExitStack() as stack:
        machine.weigh(stack, args, forwards, micro)
        acted = None if machine.planted("raise") else boom
        todo = machine.run_forwards(uid, how, forwards, micro, acted)
        try:
            todo[0].backward()
        except RuntimeError as caught:
            error = caught
        todo.clear()
    k = boom["forward"] % len(forwards)
    m = forwards[k].model
    of_model = [f.wrapper for f in forwards if f.model == m]
    owner = max(of_model, key=machine.wrappers[m].index)  # of the parameters
    skipped = bool(owner.step_skipped)
    outcomes: list[Any] = [None] * machine.world
    dist.all_gather_object(outcomes, (error is not None, skipped))
    raising = [r for r in range(machine.world) if r in boom["ranks"]]
    others = [outcomes[r] for r in range(machine.world) if r not in raising]
    check(all(outcomes[r][0] for r in raising), f"ranks {raising} raise, got {outcomes}")
    check(len(set(others)) <= 1, f"not all ranks raised: {outcomes}, {raising} on purpose")
    before = boom["block"] % len(machine.models[m].blocks)
    owes = any(machine.uses(forwards[k], rank, before) for rank in raising)
    if machine.on_failure == "skip":
        check(not any(raised for raised, _ in others), f"they skip, but {outcomes}")
        check(not owes or all(s for _, s in outcomes), f"{raising} owe, but {outcomes}")
        return
    check(not (owes and others) or others[0][0], f"{raising} owe gradients, {outcomes}")
    if machine.checks and error is None:
        synchronized = {f.model for f in forwards}
        machine.reference.backward(
            machine.models, forwards, uid, micro, args, "sum", machine.weights(args, micro),
            synchronized, [True] * machine.world, None,
        )  # fmt: skip
        for m in synchronized:
            what = f"after another rank raised: model {m}"
            machine.reference.compare(machine.rank, machine.models[m], what, machine.tolerance)


def _drop(
    machine: Any,
    uid: int,
    args: dict[str, Any],
    forward: Forward,
    micro: int,
    todo: list[Tensor] | None,
) -> None:
    """Ranks in ``drop`` skip the step. No rank has a gradient after it."""
    with contextlib.ExitStack() as stack:
        asks = machine.rank in args["drop"]
        if not asks:
            machine.weigh(stack, args, [forward], micro)
        todo = todo if todo is not None else machine.run_forwards(uid, args, [forward], micro)
        loss = sum(todo)
        if asks and not machine.planted("drop"):
            zero = forward.wrapper.skip_step()
            loss = zero if uid % 2 else loss
        loss.backward()
        todo.clear()
    _check_skipped(machine, forward, f"ranks {args['drop']} skip the step")


def _check_skipped(machine: Any, forward: Forward, why: str) -> None:
    # A wrapper that was created while everything was frozen has nothing to skip.
    trains = any(p.requires_grad for p in machine.models[forward.model].parameters())
    check(forward.wrapper.step_skipped or not trains, f"{why}, but it was not skipped")
    for name, parameter in machine.models[forward.model].named_parameters():
        check(
            parameter.grad is None or not parameter.requires_grad,
            f"after a skipped step {name} has a gradient",
        )


def _infinite(
    machine: Any,
    uid: int,
    args: dict[str, Any],
    forwards: list[Forward],
    micro: int,
    todo: list[Tensor] | None,
) -> None:
    """With check_finite, all ranks raise or skip after a gradient that is not finite."""
    todo = todo if todo is not None else machine.run_forwards(uid, args, forwards, micro)
    if machine.rank in args["infinite"] and not machine.planted("infinite"):
        todo = [loss * float("inf") for loss in todo]
    error: BaseException | None = None
    try:
        sum(todo).backward()
    except RuntimeError as caught:
        error = caught
    todo.clear()
    if machine.on_failure == "skip":
        check(error is None, f"raised, although failures skip: {error}")
        _check_skipped(machine, forwards[0], "a gradient is not finite")
    else:
        check("infinite or NaN" in str(error), f"a gradient is not finite, got {error!r}")


def freeze_alone(machine: Any, uid: int, args: dict[str, Any], forward: Forward) -> None:
    """Some ranks freeze a parameter that others train. All raise, and name it."""
    m = forward.model
    named = [(n, p) for n, p in machine.models[m].named_parameters() if p.requires_grad]
    name, parameter = named[uid % len(named)]
    if machine.rank in args["freeze_alone"] and not machine.planted("freeze_alone"):
        parameter.requires_grad_(False)
    forward = Forward(m, forward.wrapper, [[]] * machine.world)
    error: BaseException | None = None
    with contextlib.ExitStack() as stack:
        try:
            machine.weigh(stack, args, [forward], 0)
            for loss in machine.run_forwards(uid, {**args, "how": None}, [forward], 0):
                loss.backward()
        except RuntimeError as caught:
            error = caught
    parameter.requires_grad_(True)
    said = f"'{name}'" in str(error) and "frozen on rank" in str(error)
    check(said, f"{name} is frozen on some ranks, got {error!r}")
    machine.forget_gradients()
