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
    check_step,
    host_channel,
    on_ranks,
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


@pytest.mark.parametrize("shared", [True, False], ids=["shared_memory", "sockets"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["rank_1", "every_rank"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("way", ["raises", "future"])
@on_ranks(3)
def test_hook_that_fails_ends_the_wrapper_on_every_rank(
    rank: int, world: int, way: str, at: int, everywhere: bool, shared: bool
) -> None:
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


@on_ranks(2)
def test_hook_that_is_interrupted_interrupts_backward(rank: int, world: int) -> None:
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


@on_ranks(3)
def test_error_about_the_gradients_of_one_rank_ends_the_step_on_all(rank: int, world: int) -> None:
    """Hazard: the other ranks step with a sum that holds an old one of this rank."""
    ddp = DistributedDataParallel(build(), process_group=_group(), gradient_average=False)
    _loss(ddp, rank).backward()
    if rank != 1:
        ddp.zero_grad()
    said = "still held the gradient" if rank == 1 else "was ended by an exception on rank 1"
    with raises(RuntimeError, f"rank {rank}", said):
        _loss(ddp, rank).backward()
    ddp.zero_grad()
    _loss(ddp, rank).backward()


@on_ranks(4)
def test_ranks_of_a_subgroup_are_named_so_that_they_can_be_found(rank: int, world: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(build(), process_group=groups[rank // 2])
    loss = _loss(ddp, rank)
    if rank == 3:
        ddp.module.layers[1].weight.register_hook(lambda grad: 1 / 0)
    if rank == 2:
        with raises(RuntimeError, "an exception on rank 1", "ranks 2, 3 of the job"):
            loss.backward()
    elif rank == 3:
        with raises(ZeroDivisionError, "division by zero"):
            loss.backward()
    else:
        loss.backward()
