# SPDX-License-Identifier: BSD-3-Clause
"""One rank flushes subnormal numbers to zero, or rounds upward, while it computes and reduces.

Reference: the same bits on every rank, and not zero.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import (
    RankPool,
    check,
    check_equal,
    check_same_on_all_ranks,
    dense,
    floating_point_mode,
    host_channel,
)
from torch import Tensor, nn

from apex import _core
from apex._internal.group_names import name_of
from apex.parallel import DistributedDataParallel, Reducer, SyncBatchNorm

pytestmark = pytest.mark.processes

MODES = ["flush", "upward"]
CHANNEL = pytest.mark.parametrize("channel", ["1", "0"], ids=["memory", "gloo"])
MODE = pytest.mark.parametrize("mode", MODES)


def _of_last_rank(rank: int, world: int, mode: str) -> str | None:
    return mode if rank == world - 1 else None


def _uneven(numel: int, dtype: torch.dtype, rank: int, mode: str) -> Tensor:
    """Values below the smallest normal number of the dtype, or with rounded sums."""
    generator = torch.Generator().manual_seed(7 * numel + rank)
    values = torch.rand(numel, generator=generator, dtype=torch.float64) + 0.5
    smallest = 1.0 if mode == "upward" else torch.finfo(dtype).tiny / 4
    return (values * smallest).to(dtype)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def _sums(rank: int, world: int, mode: str, channel: str) -> None:
    with host_channel(channel):
        group = dist.new_group()
        for dtype in DTYPES:
            for numel in (5, 1000, 100_000):
                for how in ("sum", "average", "Reducer", "batch norm"):
                    total = _uneven(numel, dtype, rank, mode)
                    with floating_point_mode(_of_last_rank(rank, world, mode)):
                        if how == "Reducer":
                            Reducer([total], group).reduce()
                        elif how == "batch norm":
                            total = torch.ops.apex.all_reduce_sum(total, name_of(group), "")
                        else:
                            _core.all_reduce(total, name_of(group), how == "average")
                    what = f"{how} of {numel} {dtype}"
                    check_same_on_all_ranks([total], what)
                    check(total.abs().min().item() > 0, f"{what}: zeros")


@CHANNEL
@MODE
def test_all_reduce_ranks_in_other_modes_same_bits(
    ranks: RankPool, mode: str, channel: str
) -> None:
    ranks.run(3, _sums, mode, channel)


OPTIONS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "defaults": ({}, torch.float32),
    "views": ({"gradient_as_bucket_view": True}, torch.float32),
    "alone": ({"message_size": 1}, torch.float32),
    "predivide": ({"gradient_predivide_factor": 1.7}, torch.float32),
    "predivide float16": ({"gradient_predivide_factor": 1.7}, torch.float16),
    "fp32": ({"allreduce_always_fp32": True}, torch.bfloat16),
    "sparse": ({"message_size": 20}, torch.float32),
}


def _steps(rank: int, world: int, mode: str, channel: str) -> None:
    with host_channel(channel):
        group = dist.new_group()
        for name, (options, dtype) in OPTIONS.items():
            torch.manual_seed(rank)
            embedding = nn.Embedding(9, 96, sparse=name == "sparse")
            model = nn.Sequential(embedding, nn.Linear(96, 80), nn.Linear(80, 3)).to(dtype)
            ddp = DistributedDataParallel(model, process_group=group, **options)
            for step in range(3):
                ddp.zero_grad()
                ids = torch.randint(9, (6,))
                with floating_point_mode(_of_last_rank(rank, world, mode)):
                    loss = ddp(ids).sum()
                    (loss * torch.finfo(dtype).tiny if mode == "flush" else loss).backward()
                grads = [p.grad for p in ddp.parameters()]
                check_same_on_all_ranks(grads, f"{name}, step {step}")
                check(any(dense(g).abs().max() > 0 for g in grads), f"{name}: all are zero")


@CHANNEL
@MODE
def test_backward_ranks_in_other_modes_same_bits(ranks: RankPool, mode: str, channel: str) -> None:
    ranks.run(3, _steps, mode, channel)


def _statistics(rank: int, world: int, mode: str) -> None:
    scale = 1.0 if mode == "upward" else torch.finfo(torch.float32).tiny
    for momentum in (0.1, None):
        layer = SyncBatchNorm(4, momentum=momentum)
        layer.running_var.zero_()
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(5, 4, generator=generator) * scale
            with floating_point_mode(_of_last_rank(rank, world, mode)):
                layer(x)
            what = f"momentum {momentum}, step {step}"
            check_same_on_all_ranks([layer.running_mean, layer.running_var], what)
            check(layer.running_mean.abs().min().item() > 0, f"{what}: zeros")


@MODE
def test_running_statistics_ranks_in_other_modes_same_bits(ranks: RankPool, mode: str) -> None:
    ranks.run(3, _statistics, mode)


def _mode_is_restored(rank: int, world: int, mode: str) -> None:
    """The mode that a rank has chosen for its own arithmetic does not change."""
    ddp = DistributedDataParallel(nn.Linear(3, 2))

    def look() -> tuple[bool, bool]:
        tiny = torch.tensor([torch.finfo(torch.float32).tiny])
        third = torch.tensor([1.0]) / 3.0
        return (tiny / 2).item() == 0.0, third.double().item() > 1 / 3

    with floating_point_mode(mode):
        before = look()
        ddp(torch.ones(2, 3)).sum().backward()
        check_equal(look(), before, "flushes, rounds upward")
    check(before[0] == (mode == "flush"), f"the mode {mode} does nothing")


@MODE
def test_mode_of_a_rank_is_restored(ranks: RankPool, mode: str) -> None:
    ranks.run(2, _mode_is_restored, mode)
