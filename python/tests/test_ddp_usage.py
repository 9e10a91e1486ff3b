# SPDX-License-Identifier: BSD-3-Clause
"""Common uses of DistributedDataParallel: skip, freeze, replace, accumulate."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import build, data
from ddp_support import (
    RankPool,
    check,
    check_equal,
    check_same_on_all_ranks,
    check_step,
    on_ranks,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


# --- parameters without a gradient ---

#: By step and rank, the layers that are used.
LESS = [[[0, 1, 2], [0, 1, 2]], [[0, 1], [0]], [[], [0]], [[0, 2], [2]]]


def _skips(rank: int, world: int) -> dict[str, int]:
    ddp = DistributedDataParallel(build())
    for step, used in enumerate(LESS):

        def loss(model: nn.Module, r: int, step: int = step, used: Any = used) -> Tensor:
            x = data(r, step).requires_grad_()
            return (x * 1.0 + model(x * 1.0, used[r])).square().mean()

        check_step(ddp, loss, f"step {step}")
    return ddp.statistics()


def test_unused_parameters_no_rank_misses_one_reads_nothing(ranks: RankPool) -> None:
    for statistics in ranks.run(2, _skips):
        assert statistics["plans_recorded"] == 1
    spec = [[[0, 1, 2], [0, 1, 2]]] * 3
    for statistics in ranks.run(2, _all_used, spec):
        assert statistics["usage_reads"] == 0


def _all_used(rank: int, world: int, steps: Any) -> dict[str, int]:
    ddp = DistributedDataParallel(build(), message_size=20)
    for used in steps:
        ddp(data(rank), used[rank]).sum().backward()
    return ddp.statistics()


# --- parameters that change ---


def _plain_loss(model: nn.Module, rank: int) -> Tensor:
    return model(data(rank), [0, 1, 2]).square().sum()


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_a_plan_has_what_was_used_and_leaves_out_what_stays_frozen(
    rank: int, world: int, views: bool
) -> None:
    """The first backward trains one layer. Then sets alternate, and one layer stays frozen."""
    ddp = DistributedDataParallel(build(), message_size=20, gradient_as_bucket_view=views)

    def step(trained: list[int], number: int) -> None:
        for i, layer in enumerate(ddp.module.layers):
            layer.requires_grad_(i in trained)
        check_step(ddp, _plain_loss, f"step {number}")

    def planned() -> int:
        return sum(len(bucket) for bucket in ddp._reducer.plan())

    for number, trained in enumerate([[2], [0, 1], [2], [0, 1, 2], [0], [1, 2]] * 2):
        before = ddp.statistics()
        step(trained, number)
        after = ddp.statistics()
        check_equal(after["plans_recorded"], 1 if number < 2 else 2, f"plans, step {number}")
        if number > 2:
            at_end = after["launched_at_end"] - before["launched_at_end"]
            check(at_end <= 1, f"{at_end} buckets did not overlap in step {number}")
    for number in range(140):
        step([0, 1], number)
    check_equal(planned(), 4, "parameters in the plan after a layer stayed frozen")
    step([0, 1, 2], 140)
    step([0, 1], 141)
    check_equal(planned(), 6, "parameters in the plan after it was unfrozen")
    check_equal(ddp.statistics()["plans_recorded"], 4, "plans")


@on_ranks(2)
def test_frozen_parameters_are_broadcast_and_can_be_unfrozen(rank: int, world: int) -> None:
    model = build()
    model.layers[0].requires_grad_(False)
    with torch.no_grad():
        model.layers[0].weight.add_(rank)
    ddp = DistributedDataParallel(model)
    check_same_on_all_ranks(list(ddp.parameters()), "frozen parameters after construction")
    check_step(ddp, _plain_loss, "frozen")
    check_equal(len(ddp.active_params), 4, "active parameters")
    model.layers[0].requires_grad_(True)
    check_step(ddp, _plain_loss, "unfrozen")


# --- other threads ---


@on_ranks(2)
def test_thread_that_logs_does_not_wait_for_a_backward_that_waits_for_it(
    rank: int, world: int
) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    asked, answered = threading.Event(), threading.Event()

    def hook(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[Tensor]:
        asked.set()
        check(answered.wait(20), "the logging thread waits for backward")
        return allreduce_hook(group, bucket)

    def log() -> None:
        asked.wait()
        ddp.statistics()
        check(not ddp.step_skipped and ddp.require_backward_grad_sync, "state")
        check_equal(ddp.total_weight, 0.0, "total weight")
        answered.set()

    ddp.register_comm_hook(dist.group.WORLD, hook)
    thread = threading.Thread(target=log, daemon=True)
    thread.start()
    ddp(torch.ones(1, 4)).sum().backward()
    thread.join()
