# SPDX-License-Identifier: BSD-3-Clause
"""Common uses of DistributedDataParallel: unused and frozen parameters, checkpointing,
accumulation."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import backward, build, data, make, mean_gradients
from ddp_program_nets import Net
from ddp_support import check, check_equal, check_near, check_step, gradients, on_ranks, raises
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


@on_ranks(2)
def test_unused_parameters_no_rank_misses_one_reads_nothing(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(build(), message_size=20)
    for _ in range(3):
        _plain_loss(ddp, rank).backward()
    check_equal(ddp.statistics()["usage_reads"], 0, "reads")


def _plain_loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step), [0, 1, 2]).square().sum()


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
def test_a_graph_from_before_a_layer_was_frozen_and_unfrozen(rank: int, world: int) -> None:
    """As in a GAN's critic: it builds a graph, is frozen for another forward, and then runs its
    backward."""
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(build(), message_size=20)

    def loss(model: Any, r: int, step: int) -> Tensor:
        result = _plain_loss(model, r, step)
        layer = getattr(model, "module", model).layers[1].requires_grad_(False)
        _plain_loss(model, r, 20)
        layer.requires_grad_(True)
        return result

    for step in range(4):
        check_step(ddp, lambda m, r, s=step: loss(m, r, s), f"step {step}")


@on_ranks(2)
def test_checkpointing_overlaps_as_much_as_without(rank: int, world: int) -> None:
    launched = []
    for how in (None, "non-reentrant", "reentrant"):
        ddp = DistributedDataParallel(build(lambda: Net(["linear"] * 4)), message_size=20)
        for _ in range(4):
            x = torch.randn(4, 4, requires_grad=True)
            ddp(x, x, (), how).last.sum().backward()
        launched.append(ddp.statistics()["launched_in_backward"])
    check(launched[0] > 0 and launched == launched[:1] * 3, f"buckets: {launched}")


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


@on_ranks(2)
def test_no_sync_left_by_exception_synchronizes_again(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(build(), message_size=20)
    with raises(KeyError):
        with ddp.no_sync():
            raise KeyError("on purpose")
    check(ddp.require_backward_grad_sync, "no_sync() is still in force")
    for step in range(2):
        check_step(ddp, _plain_loss, f"step {step}")
    with raises(ZeroDivisionError):
        with ddp.no_sync():
            _plain_loss(ddp, rank, 3).backward()
            raise ZeroDivisionError
    ddp.zero_grad()
    check_step(ddp, _plain_loss, "after a failure between two backwards")
    ddp.disable_allreduce()
    with ddp.no_sync():
        pass
    check(not ddp.require_backward_grad_sync, "no_sync() switched disabled all-reduces on")
    ddp.enable_allreduce()
    check_step(ddp, _plain_loss, "enabled again")


@on_ranks(2)
def test_sums_not_cleared_between_backwards_raise(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make(), gradient_average=False)
    backward(ddp, rank, 0)
    with raises(RuntimeError, "still held the gradient that the last synchronized backward summed"):
        backward(ddp, rank, 1)
    for set_to_none in (True, False):
        ddp.zero_grad(set_to_none=set_to_none)
        with ddp.no_sync():
            backward(ddp, rank, 0)
        backward(ddp, rank, 1)
    first, second = (mean_gradients(ddp.module, world, step) for step in (0, 1))
    for name, grad in gradients(ddp).items():
        check_near(grad, world * (first[name] + second[name]), name, 1e-4)
