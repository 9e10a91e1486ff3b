# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that are all alive but do different things: no abort, no hang, no silent error.

The reference: in each case, either every rank raises within the pool's limit, with an error that
names the difference, or all of them end the step with equal gradients. No process ends.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import RankPool, check, free_port, host_channel
from torch import nn

from apex import _core
from apex._internal.group_names import name_of
from apex.parallel import DistributedDataParallel, SyncBatchNorm

pytestmark = pytest.mark.processes

TIMEOUT = datetime.timedelta(seconds=4)


class Injected(Exception):
    pass


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def _norms(group: Any) -> nn.Sequential:
    one = SyncBatchNorm(6, process_group=group)
    two = SyncBatchNorm(3, process_group=group)
    return nn.Sequential(nn.Linear(4, 6), one, nn.ReLU(), nn.Linear(6, 3), two)


def _batch() -> torch.Tensor:
    return torch.randn(5, 4)


def _step(model: Any) -> None:
    model(_batch()).square().sum().backward()


def repeats_a_forward(group: Any, odd: bool) -> None:
    model = _norms(group)
    _step(model)
    if odd:
        model(_batch())
    _step(model)


def skips_a_layer(group: Any, odd: bool) -> None:
    ddp = DistributedDataParallel(_norms(group), process_group=group)
    _step(ddp)
    if odd:
        ddp.module[1].forward = lambda x: x
    _step(ddp)


def goes_forward_without_gradients(group: Any, odd: bool) -> None:
    model = _norms(group)
    _step(model)
    with torch.set_grad_enabled(not odd):
        out = model(_batch())
    if not odd:
        out.square().sum().backward()
    model(_batch())


def has_other_channels(group: Any, odd: bool) -> None:
    layer = SyncBatchNorm(600 if odd else 6, process_group=group)
    layer(torch.randn(3, layer.num_features)).sum().backward()


def is_refused_before_the_exchange(group: Any, odd: bool) -> None:
    layer = SyncBatchNorm(6, process_group=group)
    layer(torch.randn(3, 6))
    layer(torch.randn(3, 5 if odd else 6))


def is_in_evaluation(group: Any, odd: bool) -> None:
    model = _norms(group)
    _step(model)
    model.train(not odd)
    _step(model)
    raise Injected("this rank is through")  # its group ends too


def does_not_join(group: Any, odd: bool) -> None:
    ddp = DistributedDataParallel(_net(), process_group=group)
    with contextlib.nullcontext() if odd else ddp.join():
        for _ in range(3 if odd else 2):
            ddp.zero_grad()
            _step(ddp)


def has_a_hook_alone(group: Any, odd: bool) -> None:
    ddp = DistributedDataParallel(_net(), process_group=group)
    _step(ddp)
    if odd:
        ddp.register_builtin_comm_hook("bf16")
    _step(ddp)
    _step(ddp)


def learns_anew_alone(group: Any, odd: bool) -> None:
    ddp = DistributedDataParallel(_net(), process_group=group, message_size=10)
    _step(ddp)
    if odd:
        ddp.rebuild_buckets()
    _step(ddp)
    _step(ddp)


def goes_past_the_wrapper(group: Any, odd: bool) -> None:
    """This is no difference, because the backward is what is synchronized."""
    ddp = DistributedDataParallel(_net(), process_group=group)
    _step(ddp)
    ddp.zero_grad()
    _step(ddp.module if odd else ddp)
    sums = [parameter.grad.clone() for parameter in ddp.parameters()]
    for mine in sums:
        other = mine.clone()
        dist.broadcast(other, 0, group=group)
        check(torch.equal(mine, other), "gradients differ")
    raise Injected("rank 1 was averaged with")


def catches_and_goes_on(group: Any, odd: bool) -> None:
    model = _net()
    ddp = DistributedDataParallel(model, process_group=group, broadcast_buffers=True)
    model.register_buffer("counter", torch.zeros(1))
    _step(ddp)

    def fail(grad: torch.Tensor) -> None:
        raise Injected("in the middle of backward")

    handle = model[0].weight.register_hook(fail) if odd else None
    try:
        _step(ddp)
    except Injected:
        handle.remove()
    _step(ddp)


def leaves_a_forward(group: Any, odd: bool) -> None:
    model = _norms(group)
    ddp = DistributedDataParallel(model, process_group=group)
    _step(ddp)

    def fail(*_: Any) -> None:
        raise Injected("between two batch norms")

    handle = model[3].register_forward_hook(fail) if odd else None
    try:
        _step(ddp)
    except Injected:
        handle.remove()
    _step(ddp)


CASES: list[Callable[[Any, bool], None]] = [
    repeats_a_forward,
    skips_a_layer,
    goes_forward_without_gradients,
    has_other_channels,
    is_refused_before_the_exchange,
    is_in_evaluation,
    does_not_join,
    has_a_hook_alone,
    learns_anew_alone,
    goes_past_the_wrapper,
    catches_and_goes_on,
    leaves_a_forward,
]


def _apart(rank: int, world: int, case: Callable[[Any, bool], None]) -> str:
    torch.manual_seed(rank)
    group = dist.new_group(timeout=TIMEOUT)
    try:
        case(group, rank == 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_rank_that_does_something_else_is_told_of(
    ranks: RankPool, case: Callable[[Any, bool], None], world: int
) -> None:
    messages = ranks.run(world, _apart, case)
    print("\n".join(messages))
    others = [message for rank, message in enumerate(messages) if rank != 1]
    for message in others:
        check(message != "", f"silent: {messages}")
        check(re.search(r"rank 1\b", message) is not None, f"rank 1 is not named: {messages}")


def _runs_two_models_in_another_order(rank: int, world: int) -> str:
    models = [DistributedDataParallel(_norms(None)) for _ in range(2)]
    try:
        for model in models if rank == 0 else reversed(models):
            model(_batch())
    except RuntimeError as error:
        return str(error)
    return ""


def test_models_of_equal_layers_are_told_apart(ranks: RankPool) -> None:
    for message in ranks.run(2, _runs_two_models_in_another_order):
        assert "the ranks are in different collectives" in message


def _wraps_on_two_threads(rank: int, world: int, channel: str, port: int) -> None:
    """Hazard: a connecting thread waits in the store, and holds the connection to it, for a key
    that the other thread of its peer is about to write."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    with host_channel(channel):
        groups = [dist.new_group() for _ in range(2)]
        failures: list[BaseException] = []

        def wrap(group: Any) -> None:
            try:
                for _ in range(20):
                    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
                    model(torch.full((1, 4), float(rank))).sum().backward()
                    grad = model.module.weight.grad
                    check(grad is not None and bool(grad.eq((world - 1) / 2).all()), "average")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=wrap, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check(not failures, f"{failures}")


@pytest.mark.parametrize("channel", ["0", "1"])
def test_threads_make_wrappers_over_groups_of_their_own(ranks: RankPool, channel: str) -> None:
    ranks.run(2, _wraps_on_two_threads, channel, free_port())


class _Late(Exception):
    """The exception of a script's signal handler."""


_absent: list[Any] = []


def _is_interrupted(rank: int, world: int, wait: str, number: int, error: BaseException) -> str:
    group = dist.new_group(timeout=2 * TIMEOUT)
    layer = SyncBatchNorm(3, process_group=group)
    if wait == "issue":
        # More collectives in flight than ranks of one host can buffer.
        model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(200)])
        ddp = DistributedDataParallel(model, process_group=group, message_size=1)
    else:
        ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    ddp(torch.randn(4, 3)).sum().backward()
    layer(torch.randn(4, 3))
    if rank == 1:
        _absent[:] = [ddp, layer]  # alive and elsewhere; a destroyed one is an immediate error
        return ""
    calls = []

    def handler(*_: object) -> None:
        calls.append(number)
        raise error

    # A process started in the background ignores Ctrl-C.
    before = signal.signal(number, signal.default_int_handler if wait == "default" else handler)
    output = ddp(torch.randn(4, 3)).sum()
    timer = threading.Timer(0.6, lambda: os.kill(os.getpid(), number))
    timer.start()
    try:
        if wait in ("backward", "issue"):
            output.backward()
        elif wait == "collective":
            _core.all_reduce(torch.ones(3), name_of(group))
        else:
            layer(torch.randn(4, 3))
        return "nothing was raised"
    except BaseException as raised:
        return f"{raised!r} after {len(calls)}"
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("wait", ["backward", "issue", "collective", "forward"])
@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGINT, KeyboardInterrupt("mine")),
        (signal.SIGTERM, SystemExit(143)),
        (signal.SIGUSR1, _Late("too late", 5)),
    ],
    ids=["SIGINT", "SIGTERM", "SIGUSR1"],
)
def test_a_wait_ends_by_what_a_signal_handler_raises(
    ranks: RankPool, wait: str, number: int, error: BaseException
) -> None:
    assert ranks.run(2, _is_interrupted, wait, number, error)[0] == f"{error!r} after 1"


def test_a_wait_ends_by_ctrl_c(ranks: RankPool) -> None:
    """With Python's own handler."""
    answer = ranks.run(2, _is_interrupted, "default", signal.SIGINT, KeyboardInterrupt())[0]
    assert answer == "KeyboardInterrupt() after 0"
