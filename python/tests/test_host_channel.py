# SPDX-License-Identifier: BSD-3-Clause
"""Shared memory between processes of one host: the path of a bucket, the fallback without it, and
leftovers.

References: check_step()'s averages in float64, the same bits as through Gloo, the process's files.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import build, data
from ddp_support import (
    REPLY_TIMEOUT_S,
    check,
    check_equal,
    check_step,
    on_ranks,
    raises,
)
from torch import Tensor, nn

from apex import _core
from apex._internal.group_names import name_of
from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step), [0, 1, 2]).square().sum()


def _group(timeout_s: float = 20) -> dist.ProcessGroup:
    return dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))


def _shared(ddp: DistributedDataParallel) -> int:
    return ddp.statistics()["reduced_in_shared_memory"]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"message_size": 1}, {"gradient_as_bucket_view": True}, {"delay_allreduce": True}],
    ids=["default", "alone", "views", "delayed"],
)
@on_ranks()
def test_buckets_take_shared_memory(rank: int, world: int, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(build(), process_group=_group(), **options)
    for step in range(4):
        check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"step {step}")
    check(_shared(ddp) >= 4, f"{_shared(ddp)} buckets in shared memory")


@pytest.mark.parametrize("way", ["off", "files"])
@on_ranks(3)
def test_one_rank_that_cannot_takes_all_along(rank: int, world: int, way: str) -> None:
    if rank == world - 1:
        if way == "off":
            os.environ["APEX_HOST_CHANNEL"] = "0"
        else:
            # No process may open more files, neither its own memory nor that of others.
            import resource

            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            group = _group()
            files = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        if way == "off" or rank != world - 1:
            group = _group()
        try:
            total = torch.full((3,), float(rank))
            from apex import _core

            _core.all_reduce(total, group.group_name)
        finally:
            if way == "files" and rank == world - 1:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        check_equal(total, torch.full((3,), world * (world - 1) / 2), "the sum")
        if way == "files":
            return
        ddp = DistributedDataParallel(build(), process_group=group)
        for step in range(3):
            check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"step {step}")
        check_equal(_shared(ddp), 0, "buckets in shared memory")
    finally:
        os.environ.pop("APEX_HOST_CHANNEL", None)


def _memory() -> list[int]:
    """The number of bytes written so far to each block of shared memory that this process has
    open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        # Hazard: threads of earlier tests' groups close files while these are listed.
        with contextlib.suppress(FileNotFoundError):
            if "memfd:apex" in os.readlink(link):
                found.append(link.stat().st_blocks * 512)
    return found


@on_ranks(2)
def test_memory_ends_with_its_wrapper(rank: int, world: int) -> None:
    group = _group()
    _loss(DistributedDataParallel(build(), process_group=group), rank).backward()
    dist.barrier(group)
    before = len(_memory())
    for _ in range(5):
        ddp = DistributedDataParallel(build(), process_group=group)
        _loss(ddp, rank).backward()
        check(len(_memory()) > 0, "no memory")
        del ddp
        dist.barrier(group)
    _loss(DistributedDataParallel(build(), process_group=group), rank).backward()
    dist.barrier(group)
    check(len(_memory()) <= before + 1, f"{len(_memory())} blocks of memory, {before} at first")
    check(not list(Path("/dev/shm").glob("*apex*")), "something in /dev/shm")


@pytest.mark.parametrize("wide", [128, 512], ids=["flat", "alone"])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"]
)
@on_ranks(2)
def test_memory_shared_is_at_most_the_buckets_once(
    rank: int, world: int, options: dict[str, Any], wide: int
) -> None:
    torch.manual_seed(rank)
    layers = [nn.Linear(wide, wide, bias=False) for _ in range((512 // wide) ** 2 * 12)]
    gc.collect()
    before = sum(_memory())  # the remains of earlier tests in this process
    ddp = DistributedDataParallel(nn.Sequential(*layers), process_group=_group(), **options)
    gradients = sum(p.numel() * p.element_size() for p in ddp.parameters())
    for _ in range(5):
        ddp.zero_grad()
        ddp(torch.randn(4, wide)).square().sum().backward()
    check(_shared(ddp) > 0, "no bucket in shared memory")
    # The copy of the model that rank 0 sends at construction is in the memory that the buckets use
    # later. A quarter is added for the space between them.
    held = sum(_memory()) - before
    check(held <= 1.3 * gradients + (1 << 20), f"{held} bytes for {gradients} of gradients")


@on_ranks(3, lost=(1,))
def test_rank_that_dies_is_named_by_its_process(rank: int, world: int) -> None:
    # A rank that waited for the timeout would not reply in time.
    group = _group(timeout_s=10 * REPLY_TIMEOUT_S)
    ddp = DistributedDataParallel(build(), process_group=group, message_size=20)
    for step in range(2):
        _loss(ddp, rank, step).backward()
    if rank == 1:
        ddp.module.layers[1].weight.register_hook(lambda grad: os._exit(7))
    with raises(RuntimeError, "rank 1 has ended (process "):
        _loss(ddp, rank, 2).backward()


@on_ranks(2)
def test_forked_child_gets_a_clear_error(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(build(), process_group=_group())
    _loss(ddp, rank).backward()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            _loss(ddp, rank, 1).backward()
        except Exception as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    said = os.read(read, 4000).decode()
    os.waitpid(child, 0)
    check("was forked" in said, said)
    check_step(ddp, lambda m, r: _loss(m, r, 1), "in the parent")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([8, 9], "9 elements"),
        ([1000, 100_000], "100000 elements"),  # which take two paths
    ],
    ids=str,
)
@on_ranks(2)
def test_sums_that_differ_between_ranks_say_in_what(
    rank: int, world: int, sizes: list[int], said: str
) -> None:
    group = _group()
    tensor = torch.ones(sizes[rank])
    with raises(RuntimeError, "the ranks are in different collectives", said):
        _core.all_reduce(tensor, name_of(group))
    check(bool((tensor == 1).all()), "the message was changed")
