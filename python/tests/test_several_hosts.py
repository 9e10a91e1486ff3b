# SPDX-License-Identifier: BSD-3-Clause
"""Ranks on several hosts: gradients are summed within each host, and then between the hosts.

References: check_step()'s averages in float64, the same bits on all ranks. The sums themselves, and
a rank that ends at each step of the protocol, are tested in cpp/tests/unit/host_hierarchy_test.cpp.
"""

from __future__ import annotations

import datetime
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from typing import Any

import hosts_support
import pytest
import torch
import torch.distributed as dist
from ddp_models import build, data
from ddp_support import check, check_equal, check_step, raises
from hosts_support import run_on_hosts
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel, SyncBatchNorm

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        bool(hosts_support.why_not()), reason=f"no namespaces: {hosts_support.why_not()}"
    ),
]

LAYOUTS = [[2, 2], [2, 2, 2]]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"message_size": 1},
    {"gradient_as_bucket_view": True},
    {"delay_allreduce": True},
]


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step), [0, 1, 2]).square().sum()


def _group(timeout_s: float = 20) -> dist.ProcessGroup:
    return dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))


def _check_same_bits(ddp: nn.Module) -> None:
    mine = torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
    first = mine.clone()
    dist.broadcast(first, 0)
    check(torch.equal(mine, first), "other bits than on rank 0")


def _by_host(rank: int, world: int) -> None:
    for options in OPTIONS:
        ddp = DistributedDataParallel(build(), process_group=_group(), **options)
        for step in range(4):
            check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"{options}, step {step}")
            _check_same_bits(ddp)
        statistics = ddp.statistics()
        check(statistics["reduced_by_host"] >= 4, f"{statistics}")
        check_equal(statistics["reduced_in_shared_memory"], 0, "buckets on one host")
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 4e-2)):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(
            nn.Linear(300, 400, dtype=dtype), process_group=_group(), message_size=1
        )
        inputs = []
        for r in range(world):
            torch.manual_seed(100 + r)
            inputs.append(torch.randn(5, 300, dtype=dtype))
        ddp(inputs[rank]).sum().backward()
        _check_same_bits(ddp)
        want = sum(x.double().sum(0) for x in inputs) / world
        error = (ddp.module.weight.grad.double() - want).abs().max() / want.abs().max()
        check(error < tolerance, f"{dtype}: {error}")


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_buckets_are_summed_by_host(hosts: list[int]) -> None:
    run_on_hosts(hosts, _by_host)


def _said(construct: Callable[[], nn.Module]) -> tuple[nn.Module, str]:
    """Captures this process's standard error, to which C++ writes."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            result = construct()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return result, file.read().decode()


def _keeps_the_group(rank: int, world: int, who: int, warned: bool) -> None:
    """Rank `who` gets no shared memory, so buckets use the process group."""
    group = _group()
    if rank == who:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    ddp, said = _said(lambda: DistributedDataParallel(build(), process_group=group))
    check_equal(said.count("APEX_HOST_CHANNEL"), int(warned), f"lines of warning in {said!r}")
    if warned:
        check(f"since rank {who} of {world} cannot share memory" in said, said)
    for step in range(3):
        check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"step {step}")
    statistics = ddp.statistics()
    check_equal(statistics["reduced_by_host"], 0, "buckets by host")
    check_equal(statistics["reduced_in_shared_memory"], 0, "buckets in shared memory")


@pytest.mark.parametrize("hosts", [[1, 1], [3, 1]], ids=str)
def test_other_numbers_of_ranks_keep_the_process_group(hosts: list[int]) -> None:
    run_on_hosts(hosts, _keeps_the_group, -1, False)


def test_switched_off_on_one_rank_is_off_on_all() -> None:
    off = {2: {"APEX_HOST_CHANNEL": "0"}}
    run_on_hosts([2, 2], _keeps_the_group, -1, False, environment=off)


def test_one_rank_that_cannot_takes_all_hosts_along() -> None:
    run_on_hosts([2, 2], _keeps_the_group, 3, True)


def _dies(rank: int, world: int, victim: int) -> None:
    # A rank that waited for the timeout would not reply in time.
    group = _group(10 * hosts_support.TIMEOUT_S)
    ddp = DistributedDataParallel(build(), process_group=group, message_size=20)
    for step in range(2):
        _loss(ddp, rank, step).backward()
    if rank == victim:
        hook = lambda grad: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        ddp.module.layers[1].weight.register_hook(hook)
    with raises(RuntimeError, f"rank {victim}"):
        _loss(ddp, rank, 2).backward()


@pytest.mark.parametrize(
    ("hosts", "victim"), [([2, 2], 3), ([2, 2], 0), ([3, 1], 3), ([3, 1], 2)], ids=str
)
def test_rank_that_dies_is_named_on_all_hosts(hosts: list[int], victim: int) -> None:
    run_on_hosts(hosts, _dies, victim, lost=(victim,))


def _with_batch_norm(rank: int, world: int) -> None:
    """SyncBatchNorm's exchanges, which use the process group, between buckets."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), SyncBatchNorm(8), nn.ReLU(), nn.Linear(8, 2))
    ddp = DistributedDataParallel(model, process_group=_group(), message_size=1)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        ddp(torch.randn(4, 6)).square().mean().backward()
        _check_same_bits(ddp)
    check(ddp.statistics()["reduced_by_host"] > 0, "not by host")


def test_batch_norm_between_hosts() -> None:
    run_on_hosts([2, 2], _with_batch_norm)
