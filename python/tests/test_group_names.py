# SPDX-License-Identifier: BSD-3-Clause
"""Process groups that c10d does not know by name, or knows by another name."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from ddp_support import RankPool, check, check_equal, on_ranks, raises
from python_group import Delegate
from torch import nn
from torch.distributed import distributed_c10d as c10d

from apex._internal.group_names import name_of
from apex.parallel import DistributedDataParallel, Reducer, SyncBatchNorm

pytestmark = pytest.mark.processes


def _averages(group: dist.ProcessGroup, rank: int, world: int) -> None:
    """Use every part of the package that takes a group with this group."""
    mean = (world + 1) / 2
    ddp = DistributedDataParallel(nn.Linear(3, 1, bias=False), process_group=group)
    ddp(torch.full((1, 3), rank + 1.0)).sum().backward()
    check_equal(ddp.module.weight.grad.tolist(), [[mean] * 3], "gradients")

    gradient = torch.full((4,), rank + 1.0)
    Reducer([gradient], process_group=group).reduce()
    check_equal(gradient.tolist(), [mean] * 4, "Reducer")

    norm = SyncBatchNorm(2, process_group=group, momentum=1.0)
    norm(torch.full((5, 2), rank + 1.0))
    check_equal(norm.running_mean.tolist(), [mean] * 2, "SyncBatchNorm")


def _registered(rank: int, world: int) -> None:
    group = dist.new_group()
    check_equal(name_of(group), group.group_name, "name")
    check(c10d._resolve_process_group(group.group_name) is group, "not the group of that name")
    _averages(group, rank, world)


def _unregistered(rank: int, world: int) -> None:
    group = dist.new_group()
    c10d._unregister_process_group(group.group_name)
    check_equal(name_of(group), group.group_name, "name")
    _averages(group, rank, world)


def _name_of_another(rank: int, world: int) -> None:
    group, other = dist.new_group(), dist.new_group()
    own = group.group_name
    c10d._unregister_process_group(own)
    c10d._register_process_group(own, other)
    check(name_of(group) != own, "the name of another group")
    check(c10d._resolve_process_group(name_of(group)) is group, "not the group of that name")
    check(c10d._resolve_process_group(own) is other, "the other group lost its name")
    _averages(group, rank, world)


def _destroyed(rank: int, world: int) -> None:
    group = dist.new_group()
    name = group.group_name
    dist.barrier()  # new_group() fails on a connecting rank if another rank leaves
    dist.destroy_process_group(group)
    check_equal(name_of(group), name, "name")
    try:
        c10d._resolve_process_group(name)
    except RuntimeError:
        return
    raise AssertionError("a group that was destroyed is registered again")


@pytest.mark.parametrize(
    "body",
    [_registered, _unregistered, _name_of_another, _destroyed],
    ids=["registered", "unregistered", "name_of_another", "destroyed"],
)
def test_group_given_as_object_is_the_one_that_is_used(ranks: RankPool, body: object) -> None:
    ranks.run(2, body)


@on_ranks(2)
def test_group_that_is_written_in_python_is_used_and_let_go(rank: int, world: int) -> None:
    inner = dist.new_group()
    group = Delegate(inner)
    stop = threading.Event()

    def compute() -> None:  # competes for the interpreter all the time
        while not stop.is_set():
            sum(range(1000))

    other = threading.Thread(target=compute)
    other.start()
    try:
        _averages(group, rank, world)
        ddp = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
        with ddp.join():
            for _ in range(2 if rank == 0 else 1):
                ddp.zero_grad()
                ddp(torch.full((1, 3), rank + 1.0)).sum().backward()
        check(group.calls.keys() == {"allreduce", "broadcast", "allgather"}, f"{group.calls}")
        with raises(ValueError, "allreduce_communicators"):
            DistributedDataParallel(nn.Linear(3, 1), process_group=group, num_allreduce_streams=2)
        two = DistributedDataParallel(
            nn.Linear(3, 1, bias=False), process_group=group, num_allreduce_streams=2,
            allreduce_communicators=([group, Delegate(dist.new_group())], [None, None]),
        )  # fmt: skip
        two(torch.full((1, 3), rank + 1.0)).sum().backward()
        check_equal(two.module.weight.grad.tolist(), [[(world + 1) / 2] * 3], "two groups")
    finally:
        stop.set()
        other.join()
    name, alive = name_of(group), weakref.ref(group)
    check(c10d._resolve_process_group(name) is group, "not the group of that name")
    del group, ddp, two
    gc.collect()
    check(alive() is None, "the group is kept alive")
    try:
        c10d._resolve_process_group(name)
    except RuntimeError:
        return
    raise AssertionError("a group that has gone is registered")
