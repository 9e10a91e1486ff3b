# SPDX-License-Identifier: BSD-3-Clause
"""straggler_report(): the rank that holds up the others, with an injected delay.

The oracles: the rank, the place and the time that were put there; and the same report on every
rank."""

from __future__ import annotations

import threading
import time
from dataclasses import astuple
from typing import Any

import pytest
import torch
from ddp_models import build, data
from ddp_support import RankPool, check, host_channel
from torch import nn

from apex.parallel import DistributedDataParallel, OverlappedOptimizer, SyncBatchNorm

pytestmark = pytest.mark.processes

#: Longer than a loaded machine delays a rank in most steps.
DELAY_S = 0.1
STEPS = 21


def _slow(_: Any) -> None:
    time.sleep(DELAY_S)


def _report(rank: int, world: int, channel: str, slow: int | None, where: str) -> Any:
    torch.manual_seed(rank)
    with host_channel(channel):
        ddp = DistributedDataParallel(build(), message_size=20)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    check(ddp.straggler_report().ranks == [], "a report of no step")
    if rank == slow and where == "gradient":
        ddp.module.layers[0].weight.register_post_accumulate_grad_hook(_slow)
    for step in range(STEPS):
        if rank == slow and where == "data":
            _slow(None)
        optimizer.zero_grad()
        loss = ddp(data(rank, step), [0, 1, 2]).square().mean()
        if rank == slow and where == "loss":
            loss.register_hook(_slow)
        loss.backward()
        optimizer.step()
    report = ddp.straggler_report()
    return astuple(report), str(report)


@pytest.mark.parametrize(
    ("where", "world", "slow", "channel"),
    [
        ("data", 2, 0, "1"),
        ("loss", 4, 1, "1"),
        ("gradient", 2, 1, "1"),
        ("gradient", 4, 2, "1"),
        ("gradient", 2, 0, "0"),  # over sockets, where reports are sent with the last bucket
    ],
)
def test_the_rank_that_is_slow_is_named_with_the_place(
    ranks: RankPool, where: str, world: int, slow: int, channel: str
) -> None:
    told = ranks.run(world, _report, channel, slow, where)
    assert all(one == told[0] for one in told)
    (steps, rows, straggler, _), text = told[0]
    assert steps == STEPS - 1, text  # the first has no plan
    assert straggler == slow, text
    own, _, before, backward, ratio, last, gap, _, gap_to = rows[slow]
    others = max(row[0] for rank, row in enumerate(rows) if rank != slow)
    assert own >= DELAY_S, text
    assert own > others, text
    assert ratio > 1, text
    assert last > 0.8, text
    if where == "gradient":
        assert backward >= DELAY_S, text
        assert gap >= DELAY_S, text
        assert gap_to is not None, text
        assert "between the gradients of" in text, text
    else:
        assert before >= DELAY_S, text
        assert "more before backward" in text


def test_nobody_is_named_where_nobody_is_slow(ranks: RankPool) -> None:
    """A loaded machine delays all ranks alike."""
    for (steps, rows, _, _), text in ranks.run(2, _report, "1", None, ""):
        assert steps == STEPS - 1
        assert len(rows) == 2
        assert "rank" in text


class _Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), SyncBatchNorm(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def _waits_in_forward(rank: int, world: int) -> Any:
    """A batch norm waits for the slow rank too. This is not the others' own time."""
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(_Normalized())
    for step in range(STEPS):
        if rank == 1:
            _slow(None)
        generator = torch.Generator().manual_seed(10 * step + rank)
        ddp(torch.randn(5, 3, generator=generator)).sum().backward()
    return ddp.straggler_report()


def test_what_others_wait_for_in_a_batch_norm_is_not_their_own_time(ranks: RankPool) -> None:
    for report in ranks.run(3, _waits_in_forward):
        assert report.straggler == 1, str(report)
        assert report.ranks[1].own_s >= DELAY_S, str(report)
        assert all(report.ranks[rank].own_s < DELAY_S for rank in (0, 2)), str(report)


def _overlapped(rank: int, world: int) -> Any:
    """backward() returns before its buckets have arrived, and the rest of the step follows."""
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(build(), message_size=20)
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.01), ddp)
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(data(rank, step), [0, 1, 2]).square().mean().backward()
        if rank == 1:
            _slow(None)
        optimizer.step()
    optimizer.synchronize()
    return ddp.straggler_report()


def test_overlapped_optimizer_the_time_after_backward_counts(ranks: RankPool) -> None:
    for report in ranks.run(2, _overlapped):
        assert report.straggler == 1, str(report)
        assert report.ranks[1].before_backward_s >= DELAY_S, str(report)


def _in_threads(rank: int, world: int) -> Any:
    """Every step, and so every wait, runs in another thread."""
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(_Normalized())

    def step() -> None:
        if rank == 1:
            _slow(None)
        ddp(torch.randn(5, 3)).sum().backward()

    for _ in range(STEPS):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    return ddp.straggler_report()


def test_steps_in_different_threads_are_counted_alike(ranks: RankPool) -> None:
    for report in ranks.run(2, _in_threads):
        assert report.straggler == 1, str(report)
        assert report.ranks[0].own_s < DELAY_S, str(report)


def _joins(rank: int, world: int) -> Any:
    """Rank 1 is slow and has less data. Then rank 0 is left alone with its own."""
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(build(), message_size=20)
    with ddp.join():
        for step in range(STEPS if rank == 1 else 2 * STEPS):
            if rank == 1:
                _slow(None)
            ddp(data(rank, step), [0, 1, 2]).square().mean().backward()
    return ddp.straggler_report()


def test_steps_without_data_on_a_rank_do_not_count(ranks: RankPool) -> None:
    for report in ranks.run(2, _joins):
        assert report.straggler == 1, str(report)
        assert report.steps == STEPS - 1, str(report)
