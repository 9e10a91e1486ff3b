# SPDX-License-Identifier: BSD-3-Clause
"""Process groups that c10d does not know by name, or knows by another name, or that several
wrappers share."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import Branches, data
from ddp_support import (
    RankPool,
    check,
    check_equal,
    check_near,
    check_same_on_all_ranks,
    gradients,
    on_ranks,
    raises,
)
from python_group import Delegate
from torch import Tensor, nn
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
    with raises(RuntimeError):  # it is not registered again
        c10d._resolve_process_group(name)


@pytest.mark.parametrize(
    "body",
    [_unregistered, _name_of_another, _destroyed],
    ids=["unregistered", "name_of_another", "destroyed"],
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
    c10d._register_process_group(name, inner)  # refused unless the name is free
    c10d._unregister_process_group(name)


# --- messages of one order: over one group, or by hooks that share one ---
#
# On the CPU, a wrapper over Gloo has its own channel. A group written in Python is shared by all
# wrappers, as NCCL's are. The references: float64 in one process, bitwise equality of ranks with
# different seeds, and the time limit of the pool.


#: The layers of the last wrapped model that each rank uses, in turn.
USED = [[0, 1, 2], [0, 2], [1]]


def _wrappers(group: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    models: list[Any] = [Branches(), Branches()]
    wrappers = [DistributedDataParallel(m, process_group=group, **options) for m in models]
    return models, wrappers


def _step(models: list[Any], wrappers: list[Any], rank: int, world: int, step: int) -> None:
    """Each rank skips other layers of the second wrapper."""

    def loss(nets: list[Any], r: int) -> Tensor:
        x = data(r, step).to(next(nets[1].parameters()).dtype)
        return nets[1](nets[0](x, [0, 1, 2]), USED[(r + step) % 3]).square().mean()

    for wrapper in wrappers:
        wrapper.zero_grad()
    loss(wrappers, rank).backward()
    references = [copy.deepcopy(m).double() for m in models]
    for reference in references:
        reference.zero_grad()
    for r in range(world):
        (loss(references, r) / world).backward()
    for i, (model, reference) in enumerate(zip(models, references, strict=True)):
        expected = gradients(reference)
        for name, grad in gradients(model).items():
            check_near(grad, expected[name], f"step {step}: model {i}, {name}")
    check_same_on_all_ranks([p.grad for m in models for p in m.parameters()], f"step {step}")


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
            dist.all_reduce(torch.zeros(16), async_op=True).get_future().then(last)
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
    models: list[Any] = [Branches(), Branches()]
    wrappers = [
        DistributedDataParallel(
            model, message_size=1, process_group=groups[0], num_allreduce_streams=2,
            allreduce_communicators=(groups, [None, None]),
        )
        for model, groups in zip(models, ([first, second], [second, first]), strict=True)
    ]  # fmt: skip
    for step in range(6):
        _step(models, wrappers, rank, world, step)
    for wrapper in wrappers:  # during backward, ranks could launch in different orders
        check_equal(wrapper.statistics()["launched_in_backward"], 0, "launched in backward")
