# SPDX-License-Identifier: BSD-3-Clause
"""The effect of a failure in one wrapper on others of the same group, and on the group itself.

References: gradients as check_step() has them, in float64, and the rank that errors name.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import build, data
from ddp_support import check, check_step, host_channel, raises, run_ranks, shared_pool
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel, SyncBatchNorm

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", autouse=True)
def _pool_is_discarded() -> Iterator[None]:
    yield
    shared_pool().discard()


LATE_S = 0.6  # longer than a usual wait, so ranks check the reports of others


class Hook:
    """A hook that averages, and fails on request."""

    def __init__(self, world: int) -> None:
        self.fails = False
        self._world = world
        self._group = dist.new_group()

    def __call__(self, state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        if self.fails:
            raise ValueError("a hook that fails")
        work = dist.all_reduce(bucket.buffer().div_(self._world), group=self._group, async_op=True)
        return work.get_future().then(lambda f: f.value()[0])


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step), [0, 1, 2]).square().sum()


def _wrap(group: dist.ProcessGroup, hook: Hook | None = None) -> DistributedDataParallel:
    ddp = DistributedDataParallel(build(), process_group=group, message_size=20)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    check_step(ddp, _loss, "before")
    ddp.zero_grad()
    return ddp


def _late_step(ddp: DistributedDataParallel, rank: int) -> None:
    if rank == 2:
        time.sleep(LATE_S)
    ddp.zero_grad()
    check_step(ddp, _loss, "after another wrapper has failed")


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def _fail(ddp: DistributedDataParallel, rank: int) -> None:
    with raises(RuntimeError, "a hook that fails"):
        _loss(ddp, rank).backward()


def _others_go_on(rank: int, world: int, channel: str) -> None:
    with host_channel(channel):
        group = dist.new_group(timeout=datetime.timedelta(seconds=20))
        hook = Hook(world)
        fails, sibling = _wrap(group, hook), _wrap(group)
        norm = SyncBatchNorm(4, process_group=group).double()
        values = torch.randn(6, 4, dtype=torch.float64)
        norm(values)
        hook.fails = rank == 1
        _fail(fails, rank)
        _late_step(sibling, rank)
        if rank == 2:
            time.sleep(LATE_S)
        norm(values)
        _late_step(_wrap(group), rank)


@pytest.mark.parametrize("channel", ["1", "0"], ids=["shared_memory", "sockets"])
def test_wrapper_fails_others_of_its_group_go_on(channel: str) -> None:
    run_ranks(3, _others_go_on, channel)


def _silent_later(rank: int, world: int, uses_group: bool) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    hook = Hook(world)
    ddp = _wrap(group, hook)
    norm = SyncBatchNorm(4, process_group=group).double()
    values = torch.randn(6, 4, dtype=torch.float64)
    hook.fails = rank == 1
    _fail(ddp, rank)
    if uses_group:
        norm(values)
    if rank != 2:
        text = _error_of(lambda: norm(values))
        check("rank 2 has not reported this failure" in text, text)
        check("rank 2 failed in" not in text, f"an old failure counts: {text}")
    dist.barrier()  # all ranks, with another timeout


@pytest.mark.parametrize("uses_group", [True, False])
def test_rank_is_silent_after_a_wrapper_has_failed_it_is_named(uses_group: bool) -> None:
    run_ranks(3, _silent_later, uses_group)


def _refuses_again(rank: int, world: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=20))
    norm = SyncBatchNorm(4, process_group=group).double()
    values = torch.randn(6, 4, dtype=torch.float64)
    norm(values)
    if rank == 1:
        for _ in range(3):
            with raises(ValueError, "channels"):
                norm(torch.randn(6, 5, dtype=torch.float64))
    else:
        time.sleep(LATE_S)
        with raises(
            RuntimeError, "another rank reports that a collective of this group has failed"
        ):
            norm(values)
    dist.barrier()


def test_call_is_refused_again_before_others_come_to_it_they_hear() -> None:
    run_ranks(3, _refuses_again)
