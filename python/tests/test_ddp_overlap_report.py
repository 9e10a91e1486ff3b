# SPDX-License-Identifier: BSD-3-Clause
"""record_overlap() and overlap_report(): order and counts, but no durations."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from ddp_support import RankPool, check, check_equal, raises
from torch import nn

from apex.parallel import DistributedDataParallel, OverlappedOptimizer, OverlapReport

pytestmark = pytest.mark.processes


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def backward(ddp: nn.Module, rank: int) -> None:
    ddp.zero_grad()
    ddp(torch.full((5, 6), 1.0 + rank)).square().sum().backward()


def check_report(ddp: Any) -> OverlapReport:
    report = ddp.overlap_report()
    check(isinstance(report, OverlapReport), f"got {report!r}")
    check_equal(report.clock, "host", "clock")
    check(0 <= report.last_gradient_s <= report.backward_s, f"{report!r}")
    check(report.exposed_s + report.hidden_s <= report.communication_s + 1e-9, f"{report!r}")
    check(0 <= report.hidden_fraction <= 1, f"{report!r}")
    for bucket in report.buckets:
        check(0 <= bucket.ready_s <= bucket.launched_s <= bucket.arrived_s, f"{bucket}")
    check_equal([b.names for b in report.buckets], ddp.bucket_plan(), "buckets")
    names = [name for name, _ in ddp.module.named_parameters()]
    parameters = list(ddp.module.parameters())
    for bucket in report.buckets:
        check_equal([names[i] for i in bucket.parameters], bucket.names, "parameters")
        least = sum(4 * parameters[i].numel() for i in bucket.parameters)
        check(bucket.bytes >= least, f"{bucket.bytes} bytes, at least {least}")
    lines = str(report).splitlines()
    check_equal(len(lines), 3 + len(report.buckets), f"lines of\n{report}")
    for line, bucket in zip(lines[3:], report.buckets, strict=True):
        check(bucket.names[0] in line, f"{bucket.names} in '{line}'")
    return report


def _reports(rank: int, world: int, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(make(), message_size=100, **options)
    check_equal(ddp.overlap_report(), None, "report of nothing")
    backward(ddp, rank)
    check_equal(ddp.overlap_report(), None, "report while off")
    ddp.record_overlap()
    check_equal(ddp.overlap_report(), None, "report before a backward")
    backward(ddp, rank)
    report = check_report(ddp)
    check(len(report.buckets) >= 3, str(report))
    check(all(b.arrived_s <= report.backward_s for b in report.buckets), f"{report!r}")
    check_equal(pickle.loads(pickle.dumps(report)), report, "pickled")
    with ddp.no_sync():
        backward(ddp, rank)
    check_equal(ddp.overlap_report(), report, "report after a backward in no_sync()")

    # Recording continues with a new engine, and in a copy.
    ddp.module.add_module("more", nn.Linear(4, 4))
    backward(ddp, rank)
    backward(ddp, rank)
    check_report(ddp)
    again = copy.deepcopy(ddp)
    backward(again, rank)
    check_report(again)

    ddp.record_overlap(False)
    check_equal(ddp.overlap_report(), None, "report when it was turned off")
    backward(ddp, rank)
    check_equal(ddp.overlap_report(), None, "report after it was turned off")


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"]
)
def test_overlap_report_two_ranks_orders_and_counts(
    ranks: RankPool, options: dict[str, Any]
) -> None:
    ranks.run(2, _reports, options)


def _compiled(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(torch.compile(make(), backend="aot_eager"), message_size=100)
    ddp.record_overlap()
    for _ in range(3):
        backward(ddp, rank)
        check_report(ddp)


def test_overlap_report_compiled_module(ranks: RankPool) -> None:
    ranks.run(2, _compiled)


def _joins(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make(), message_size=100)
    ddp.record_overlap()
    with ddp.join():
        for _ in range(2 + rank):
            backward(ddp, rank)
    check_report(ddp)


def test_overlap_report_join_shadowed_backward_is_reported(ranks: RankPool) -> None:
    ranks.run(2, _joins)


def _overlapped(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make(), message_size=100)
    ddp.record_overlap()
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.01), ddp)
    for _ in range(6):
        optimizer.zero_grad()
        ddp(torch.full((5, 6), 1.0 + rank)).square().sum().backward()
        optimizer.step()
    optimizer.synchronize()
    check(ddp.statistics()["deferred"] > 0, "no backward was deferred")
    check_report(ddp)


def test_overlap_report_overlapped_optimizer_when_synchronized(ranks: RankPool) -> None:
    ranks.run(2, _overlapped)


def _refused(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    refused = []

    def switch(_: torch.Tensor) -> None:
        with raises(RuntimeError, "while a backward is running"):
            ddp.record_overlap()
        refused.append(1)

    ddp.module[0].weight.register_hook(switch)
    backward(ddp, rank)
    check_equal(len(refused), 1, "refusals")
    backward(ddp, rank)
    check_equal(ddp.overlap_report(), None, "report")


def test_overlap_report_switched_during_backward_is_refused(ranks: RankPool) -> None:
    ranks.run(1, _refused)
