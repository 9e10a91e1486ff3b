# SPDX-License-Identifier: BSD-3-Clause
"""Several wrappers whose messages have one order: over one group, or by hooks that share one.

On the CPU, a wrapper over Gloo has its own channel. A group written in Python is shared by all
wrappers, as NCCL's are. The references: float64 in one process, bitwise equality of ranks with
different seeds, and the time limit of the pool."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import on_ranks
from python_group import Delegate
from several_support import Net, batch, check_average
from torch import Tensor

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

#: The layers of the last wrapped model that each rank uses, in turn.
USED = [[0, 1, 2], [0, 2], [1]]


def _wrappers(group: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    models: list[Any] = [Net(), Net()]
    wrappers = [DistributedDataParallel(m, process_group=group, **options) for m in models]
    return models, wrappers


def _step(models: list[Any], wrappers: list[Any], rank: int, world: int, step: int) -> None:
    """Each rank skips other layers of the second wrapper."""

    def loss(nets: list[Any], r: int) -> Tensor:
        x = batch(r, step).to(next(nets[1].parameters()).dtype)
        return nets[1](nets[0](x), USED[(r + step) % 3]).square().mean()

    for wrapper in wrappers:
        wrapper.zero_grad()
    loss(wrappers, rank).backward()
    check_average(models, loss, world, f"step {step}")


def _group(shared: bool) -> Any:
    return Delegate(dist.group.WORLD) if shared else None


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("phases", [1, 2])
@on_ranks(2)
def test_hooks_of_two_wrappers_on_one_group(
    rank: int, world: int, phases: int, shared: bool
) -> None:
    """Hooks of both wrappers on the default group. The ranks are slow in turn."""
    torch.manual_seed(rank)
    models, wrappers = _wrappers(_group(shared), message_size=1)

    def hook(_: None, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(world)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        if rank == bucket.index() % world:
            time.sleep(0.002)

        def last(_: Any = None) -> None:
            time.sleep(0.002 * ((rank + bucket.index()) % 2))
            work = dist.all_reduce(buffer, async_op=True)
            work.get_future().then(lambda _: done.set_result(buffer))

        if phases == 2:
            dist.all_reduce(torch.zeros(36), async_op=True).get_future().then(last)
        else:
            last()
        return done

    for wrapper in wrappers:
        wrapper.register_comm_hook(None, hook)
    for step in range(6):
        _step(models, wrappers, rank, world, step)


@on_ranks(3)
def test_groups_that_overlap(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    first, second = (Delegate(dist.new_group()) for _ in range(2))
    models: list[Any] = [Net(), Net()]
    wrappers = [
        DistributedDataParallel(
            model, message_size=1, process_group=groups[0], num_allreduce_streams=2,
            allreduce_communicators=(groups, [None, None]),
        )
        for model, groups in zip(models, ([first, second], [second, first]), strict=True)
    ]  # fmt: skip
    for step in range(6):
        _step(models, wrappers, rank, world, step)
