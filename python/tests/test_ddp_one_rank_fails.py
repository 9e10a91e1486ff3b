# SPDX-License-Identifier: BSD-3-Clause
"""One rank's backward fails, early or when all its gradients are ready. Every rank raises, and
every later backward is correct.

References: each exchange ends within the group's timeout, and check_step()'s averages in float64.
"""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import build, data
from ddp_support import (
    RankPool,
    check_step,
    host_channel,
    raises,
)
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def _group() -> dist.ProcessGroup:
    return dist.new_group(timeout=datetime.timedelta(seconds=20))


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step), [0, 1, 2]).square().sum()


def _average(
    world: int, bucket: Any, group: dist.ProcessGroup | None = None
) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(world), group=group, async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


def _result_is_refused(rank: int, world: int, changes: bool) -> None:
    """Rank 0's hook yields too few elements, or the last rank alone has frozen a parameter, of
    which every rank is notified first."""
    ddp = DistributedDataParallel(build(), process_group=_group(), message_size=20)
    fails = [False]

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        future = _average(world, bucket)
        return future.then(lambda f: f.value()[1:]) if fails[0] and rank == 0 else future

    ddp.register_comm_hook(None, hook)
    for step in range(5):
        fails[0] = step == 2
        if not fails[0]:
            check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"step {step}")
            continue
        if changes and rank == world - 1:
            ddp.module.layers[1].weight.requires_grad_(False)
        ddp.zero_grad()
        if changes:
            with raises(RuntimeError, f"'layers.1.weight' is frozen on rank {world - 1}"):
                _loss(ddp, rank, step).backward()
        elif rank == 0:
            with raises(Exception, "elements"):
                _loss(ddp, rank, step).backward()
        else:
            _loss(ddp, rank, step).backward()
        ddp.zero_grad()
        ddp.module.layers[1].weight.requires_grad_(True)


@pytest.mark.parametrize("changes", [False, True], ids=["alone", "frozen"])
@pytest.mark.parametrize("world", [2, 3])
def test_result_of_a_hook_that_one_rank_refuses(ranks: RankPool, world: int, changes: bool) -> None:
    ranks.run(world, _result_is_refused, changes)


def _hook_fails(rank: int, world: int, way: str, at: int, everywhere: bool, shared: bool) -> None:
    """Every rank raises in the same step, with rank, bucket and cause, and the wrapper has failed
    for good."""
    with host_channel("1" if shared else "0"):
        group = _group()
        ddp = DistributedDataParallel(build(), process_group=group, message_size=20)

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        def fail(f: Any) -> Tensor:
            raise LookupError("on purpose")

        if not fails or bucket.index() != at:
            return _average(world, bucket, group)
        if way == "raises":
            raise LookupError("on purpose")
        return _average(world, bucket, group).then(fail)

    fails = False
    ddp.register_comm_hook(None, hook)
    for step in range(2):
        check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"step {step}")
    fails = rank == 1 or everywhere
    parts = [f"rank {rank} of {world}: ", f"'Python function', for bucket {at} (", "on purpose"]
    if not fails:
        parts.append("rank 1 failed in communication hook")
    with raises(RuntimeError, *parts, "restart with a new process group"):
        _loss(ddp, rank).backward()
    fails = False
    with raises(RuntimeError, "restart with a new process group"):
        _loss(ddp, rank).backward()


@pytest.mark.parametrize("shared", [True, False], ids=["shared_memory", "sockets"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["rank_1", "every_rank"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("way", ["raises", "future"])
def test_hook_that_fails_ends_the_wrapper_on_every_rank(
    ranks: RankPool, way: str, at: int, everywhere: bool, shared: bool
) -> None:
    ranks.run(3, _hook_fails, way, at, everywhere, shared)


def _hook_is_interrupted(rank: int, world: int) -> None:
    group = _group()
    ddp = DistributedDataParallel(build(), process_group=group)

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        if rank == 1:
            raise KeyboardInterrupt
        return _average(world, bucket, group)

    ddp.register_comm_hook(None, hook)
    with raises(KeyboardInterrupt if rank == 1 else RuntimeError):
        _loss(ddp, rank).backward()
    with raises(RuntimeError, "restart with a new process group"):
        _loss(ddp, rank).backward()


def test_hook_that_is_interrupted_interrupts_backward(ranks: RankPool) -> None:
    ranks.run(2, _hook_is_interrupted)


def _fail(_: Tensor) -> None:
    raise ArithmeticError("in backward")


def _chained_hook(rank: int, world: int, failing: int, at: int) -> None:
    """Each bucket takes two collectives. The failing rank launches the remaining buckets in the
    order of its peers, so after the second collective of the previous bucket."""
    group = _group()
    ddp = DistributedDataParallel(build(), process_group=group, message_size=20)

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(world)

        def rest(f: Any) -> Tensor:
            dist.all_reduce(buffer[1:], group=group, async_op=True).get_future().wait()
            return buffer

        return dist.all_reduce(buffer[:1], group=group, async_op=True).get_future().then(rest)

    ddp.register_comm_hook(None, hook)
    for step in range(6):
        if step not in (1, 3, 4):
            check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"step {step}")
            continue
        ddp.zero_grad()
        handle = None
        if rank == failing:
            handle = ddp.module.layers[at].bias.register_hook(_fail)
        with raises(Exception, "in backward" if rank == failing else "ended by an exc"):
            _loss(ddp, rank, step).backward()
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_chained_hook_when_one_backward_fails_leaves_the_next_step_right(
    ranks: RankPool, failing: int, at: int
) -> None:
    ranks.run(3, _chained_hook, failing, at)
