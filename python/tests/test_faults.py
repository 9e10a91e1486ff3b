# SPDX-License-Identifier: BSD-3-Clause
"""A rank ends where the campaign (faults/) does not end one.

The references: every survivor raises within the pool's limit, and its error names the operation and
the culprit, and no other rank."""

from __future__ import annotations

import datetime
import os
import re
import signal
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ddp_support import RankPool, check, on_ranks
from torch import nn

from apex._internal.groups import split_world
from apex.parallel import DistributedDataParallel, convert_syncbn_model, syncbn_group

pytestmark = pytest.mark.processes

TIMEOUT = datetime.timedelta(seconds=6)
CULPRIT = 1


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _check_named(rank: int, world: int, message: str) -> None:
    check(f"rank {rank} of {world}" in message, message)
    named = set(
        re.findall(r"(?:; |failed: )ranks? ([\d, ]+) (?:has|have|is|are|reports) ", message)
    )
    check(named == {str(CULPRIT)}, f"named: {named}, in: {message}")


def _first_forward() -> None:
    syncbn_group._own_group = None  # an earlier test on these ranks may have created it
    model = convert_syncbn_model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    ddp = DistributedDataParallel(model)
    dist.barrier()
    if dist.get_rank() == CULPRIT:
        _die()
    ddp(torch.randn(5, 4))


def _split() -> None:
    if dist.get_rank() == CULPRIT:
        _die()
    split_world([[0, 1], [2]])


CREATE: dict[str, Callable[[], None]] = {
    "batch norm": _first_forward,
    "split": _split,
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


@on_ranks(4, lost=(CULPRIT,))
def test_rank_killed_before_a_backward_of_several_wrappers_is_named(rank: int, world: int) -> None:
    """Each wrapper of the backward checks the others while it waits."""
    group = dist.new_group(timeout=TIMEOUT)
    wrappers = [DistributedDataParallel(nn.Linear(4, 2), process_group=group) for _ in range(3)]
    loss = torch.stack([wrapper(torch.randn(3, 4)).sum() for wrapper in wrappers]).sum()
    if rank == CULPRIT:
        _die()
    with pytest.raises(RuntimeError, match="of backward number 1 failed") as raised:
        loss.backward()
    _check_named(rank, world, str(raised.value))
