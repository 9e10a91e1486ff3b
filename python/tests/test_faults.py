# SPDX-License-Identifier: BSD-3-Clause
"""A rank ends or is stopped at various points.

The references: every survivor raises within the pool's limit, and its error names the operation and
the culprit, and no other rank."""

from __future__ import annotations

import datetime
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import RankPool, check, raises
from striking_store import StrikingStore
from torch import Tensor, nn

from apex._internal.groups import group_like, split, world_group
from apex.parallel import DistributedDataParallel, SyncBatchNorm, convert_syncbn_model, syncbn_group

pytestmark = pytest.mark.processes

TIMEOUT = datetime.timedelta(seconds=6)
CULPRIT = 1

DEEDS: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(0),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def _hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    future = state.allreduce([bucket.buffer()]).get_future()
    return future.then(lambda done: done.value()[0] / state.size())


def _batch_norm(group: Any, do: Callable[[], Any]) -> Callable[[int], None]:
    layer = SyncBatchNorm(4, process_group=group)

    def step(number: int) -> None:
        if number == 2:
            do()
        layer(torch.randn(3, 4, 5)).sum().backward()

    return step


def _batch_norm_backward(group: Any, do: Callable[[], Any]) -> Callable[[int], None]:
    layer = SyncBatchNorm(4, process_group=group)

    def step(number: int) -> None:
        out = layer(torch.randn(3, 4, 5, requires_grad=True))
        if number == 2:
            do()
        out.square().sum().backward()

    return step


def _wrapper(kind: str) -> Callable[[Any, Callable[[], Any]], Callable[[int], None]]:
    def make(group: Any, do: Callable[[], Any]) -> Callable[[int], None]:
        layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)]
        model = nn.Sequential(*layers)
        ddp = DistributedDataParallel(model, process_group=group, message_size=20)
        if kind == "python hook":
            ddp.register_comm_hook(group, _hook)
        elif kind == "built-in hook":
            ddp.register_builtin_comm_hook("bf16")
        number_now = 0
        model[2].weight.register_hook(lambda grad: do() if number_now == 2 else None)

        def step(number: int) -> None:
            nonlocal number_now
            number_now = number
            ddp(torch.randn(3, 4)).sum().backward()

        return step

    return make


def _several_wrappers(group: Any, do: Callable[[], Any]) -> Callable[[int], None]:
    """Several wrappers in one backward. Each checks the others while it waits."""
    wrappers = [DistributedDataParallel(nn.Linear(4, 2), process_group=group) for _ in range(3)]

    def step(number: int) -> None:
        loss = sum(wrapper(torch.randn(3, 4)).sum() for wrapper in wrappers)
        if number == 2:
            do()
        loss.backward()

    return step


def _construction(group: Any, strike: Callable[[], None]) -> Callable[[int], None]:
    """The first use of a group. Ranks that are not neighbors of the lost rank are notified too."""
    dist.barrier()  # all have connected; see init_group()

    def step(number: int) -> None:
        strike()
        DistributedDataParallel(nn.Linear(4, 2), process_group=group)

    return step


POINTS = {
    "construction": (_construction, "handshake of ranks that may share memory"),
    "several wrappers": (_several_wrappers, "all-reduce of bucket "),
    "backward": (_wrapper("plain"), "all-reduce of bucket "),
    # The first awaited message is a bucket's, or that of the used-parameter mask.
    "python hook": (_wrapper("python hook"), "bucket "),
    "built-in hook": (_wrapper("built-in hook"), "bucket "),
    "batch norm": (_batch_norm, "exchange in forward of a SyncBatchNorm of 4 channels"),
    "batch norm's backward": (_batch_norm_backward, "exchange in backward of a SyncBatchNorm"),
}


def _fault(rank: int, world: int, point: str, deed: str) -> str:
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    make, operation = POINTS[point]
    group = dist.new_group(timeout=TIMEOUT)
    step = make(group, DEEDS[deed] if rank == CULPRIT else lambda: None)
    try:
        for number in range(4):
            step(number)
    except RuntimeError as error:
        message = str(error)
    else:
        raise AssertionError("nothing was raised")
    finally:
        if deed == "stopped" and rank == (CULPRIT + 1) % world:
            os.kill(pids[CULPRIT], signal.SIGKILL)
    check(operation in message, message)
    _check_named(rank, world, message)
    return message


def _check_named(rank: int, world: int, message: str) -> None:
    check(f"rank {rank} of {world}" in message, message)
    named = set(
        re.findall(r"(?:; |failed: )ranks? ([\d, ]+) (?:has|have|is|are|reports) ", message)
    )
    check(named == {str(CULPRIT)}, f"named: {named}, in: {message}")


def _killed_while_connecting(rank: int, world: int, folder: str) -> None:
    """The rank is killed before it announces its address, so no connection of the others breaks.

    Without shared memory, for which a reducer needs no connections.
    """
    dist.destroy_process_group()
    os.environ["APEX_HOST_CHANNEL"] = "0"
    store: dist.Store = dist.FileStore(f"{folder}/store", world)
    if rank == CULPRIT:
        store = StrikingStore(store, DEEDS["killed"])
    minute = datetime.timedelta(minutes=1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=minute)
    head = f"rank {rank} of {world}: connecting a reducer's communicator failed"
    try:
        with raises(RuntimeError, head, f"rank {CULPRIT} has ended"):
            DistributedDataParallel(nn.Linear(4, 2))
    finally:
        del os.environ["APEX_HOST_CHANNEL"]


def test_rank_killed_while_connecting_is_not_waited_for(ranks: RankPool, tmp_path: Path) -> None:
    # The group's timeout is longer than the pool's.
    ranks.run(3, _killed_while_connecting, str(tmp_path), lost=(CULPRIT,), timeout_s=40)


def _first_forward() -> None:
    syncbn_group._own_group = None  # an earlier test on these ranks may have created it
    model = convert_syncbn_model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    ddp = DistributedDataParallel(model)
    dist.barrier()
    if dist.get_rank() == CULPRIT:
        DEEDS["killed"]()
    ddp(torch.randn(5, 4))


def _split() -> None:
    if dist.get_rank() == CULPRIT:
        DEEDS["killed"]()
    split(world_group(), [[0, 1], [2]], "group_size", "group_size=0")


def _like() -> None:
    if dist.get_rank() == CULPRIT:
        DEEDS["killed"]()
    group_like(world_group())


CREATE: dict[str, Callable[[], None]] = {
    "batch norm": _first_forward,
    "split": _split,
    "like": _like,
}


def _killed_before_a_group_is_created(rank: int, world: int, what: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        CREATE[what]()
    _check_named(rank, world, str(raised.value))


@pytest.mark.parametrize("what", CREATE)
def test_rank_killed_before_a_group_is_created_is_not_waited_for(
    ranks: RankPool, what: str
) -> None:
    # The group's timeout, for which torch would wait, is longer than the pool's.
    ranks.run(3, _killed_before_a_group_is_created, what, lost=(CULPRIT,), timeout_s=25)


# A stopped rank takes the whole timeout. faults/campaign.py has many more cases.
CASES = [(point, "killed", 4) for point in POINTS]
CASES += [("backward", "exits", 3), ("batch norm", "exits", 2)]
CASES += [
    ("backward", "stopped", 2),
    ("several wrappers", "stopped", 2),
    ("batch norm", "stopped", 3),
]


@pytest.mark.parametrize(("point", "deed", "world"), CASES)
def test_survivors_name_the_rank_that_is_lost(
    ranks: RankPool, point: str, deed: str, world: int
) -> None:
    ranks.run(world, _fault, point, deed, lost=(CULPRIT,))
