# SPDX-License-Identifier: BSD-3-Clause
"""One rank's backward fails, or asks to skip the step. Every rank raises or skips, and every later
backward is correct.

References: each exchange ends within the group's timeout, and check_step()'s averages in float64.
In a skipped step every rank has no gradient and unchanged parameters.
"""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import Mlp, backward, batch, build, data, make
from ddp_support import (
    check,
    check_equal,
    check_same_on_all_ranks,
    check_step,
    host_channel,
    on_ranks,
    raises,
)
from torch import Tensor, nn

from apex import amp
from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def _group() -> dist.ProcessGroup:
    return dist.new_group(timeout=datetime.timedelta(seconds=20))


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step), [0, 1, 2]).square().sum()


def _average(
    world: int, bucket: Any, group: dist.ProcessGroup | None = None
) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(world), group=group, async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


@pytest.mark.parametrize("shared", [True, False], ids=["shared_memory", "sockets"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["rank_1", "every_rank"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("way", ["raises", "future"])
@on_ranks(3)
def test_hook_that_fails_ends_the_wrapper_on_every_rank(
    rank: int, world: int, way: str, at: int, everywhere: bool, shared: bool
) -> None:
    """Every rank raises in the same step, with rank, bucket and cause, and the wrapper has failed
    for good."""
    with host_channel("1" if shared else "0"):
        group = _group()
        ddp = DistributedDataParallel(build(), process_group=group, message_size=20)

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        def fail(f: Any) -> Tensor:
            raise LookupError("on purpose")

        if not fails or bucket.index() != at:
            return _average(world, bucket, group)
        if way == "raises":
            raise LookupError("on purpose")
        return _average(world, bucket, group).then(fail)

    fails = False
    ddp.register_comm_hook(None, hook)
    for step in range(2):
        check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"step {step}")
    fails = rank == 1 or everywhere
    parts = [f"rank {rank} of {world}: ", f"'Python function', for bucket {at} (", "on purpose"]
    if not fails:
        parts.append("rank 1 failed in communication hook")
    with raises(RuntimeError, *parts, "restart with a new process group"):
        _loss(ddp, rank).backward()
    fails = False
    with raises(RuntimeError, "restart with a new process group"):
        _loss(ddp, rank).backward()


@on_ranks(2)
def test_hook_that_is_interrupted_interrupts_backward(rank: int, world: int) -> None:
    group = _group()
    ddp = DistributedDataParallel(build(), process_group=group)

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        if rank == 1:
            raise KeyboardInterrupt
        return _average(world, bucket, group)

    ddp.register_comm_hook(None, hook)
    with raises(KeyboardInterrupt if rank == 1 else RuntimeError):
        _loss(ddp, rank).backward()
    with raises(RuntimeError, "restart with a new process group"):
        _loss(ddp, rank).backward()


@on_ranks(3)
def test_error_about_the_gradients_of_one_rank_ends_the_step_on_all(rank: int, world: int) -> None:
    """Hazard: the other ranks step with a sum that holds an old one of this rank."""
    ddp = DistributedDataParallel(build(), process_group=_group(), gradient_average=False)
    _loss(ddp, rank).backward()
    if rank != 1:
        ddp.zero_grad()
    said = "still held the gradient" if rank == 1 else "was ended by an exception on rank 1"
    with raises(RuntimeError, f"rank {rank}", said):
        _loss(ddp, rank).backward()
    ddp.zero_grad()
    _loss(ddp, rank).backward()


@on_ranks(4)
def test_ranks_of_a_subgroup_are_named_so_that_they_can_be_found(rank: int, world: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(build(), process_group=groups[rank // 2])
    loss = _loss(ddp, rank)
    if rank == 3:
        ddp.module.layers[1].weight.register_hook(lambda grad: 1 / 0)
    if rank == 2:
        with raises(RuntimeError, "an exception on rank 1", "ranks 2, 3 of the job"):
            loss.backward()
    elif rank == 3:
        with raises(ZeroDivisionError, "division by zero"):
            loss.backward()
    else:
        loss.backward()


def _expect_skipped(ddp: Any, before: list[Tensor], what: str) -> None:
    check(ddp.step_skipped, f"{what}: step_skipped is False")
    for (name, parameter), old in zip(ddp.named_parameters(), before, strict=True):
        check(parameter.grad is None, f"{what}: {name} has a gradient")
        check_equal(parameter.detach(), old, f"{what}: {name}")


@on_ranks(2)
def test_steps_after_skipped_ones_may_differ_by_rank_and_are_compared(
    rank: int, world: int
) -> None:
    """Ranks may or may not step after a skipped step. A real difference is still detected."""
    ddp = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(12):
        optimizer.zero_grad()
        if step == 5:  # rank 0 has no gradients from which a plan could be made
            ddp.rebuild_buckets()
        if step % 2 == 1 and rank == 0:
            ddp.skip_step().backward()
            continue
        backward(ddp, rank, step)
        optimizer.step()
    check_equal(ddp.statistics()["plans_recorded"], 3, "plans: steps 0, 5 and 6")
    if rank == 1:
        with torch.no_grad():
            next(ddp.parameters()).add_(1)
    with raises(RuntimeError, "the ranks are out of step: rank 1 updated the parameters"):
        backward(ddp, rank, 20)
        backward(ddp, rank, 21)


def _fail(grad: Tensor) -> None:
    raise MemoryError("on purpose")


def _failing_loss(ddp: Any, rank: int, step: int, at: str) -> Tensor:
    x = batch(rank, step).requires_grad_().clone()
    # "below": when all gradients are ready
    fails = x if at == "below" else list(ddp.parameters())[{"middle": 2, "last": 0}[at]]
    _handles.append(fails.register_hook(_fail))
    return ddp(x).square().sum()


_handles: list[Any] = []


@on_ranks(2)
def test_skip_step_where_it_cannot_work_is_refused(rank: int, world: int) -> None:
    with raises(ValueError, "on_failure must be 'raise' or 'skip', got 'ignore'"):
        DistributedDataParallel(make(), on_failure="ignore")
    with raises(RuntimeError, "on_failure='skip' (skip_failed_steps)"):
        DistributedDataParallel(make(), on_failure="skip" if rank == 0 else "raise")
    late = DistributedDataParallel(make())
    backward(late, rank, 0)
    next(iter(late.parameters())).register_hook(lambda g: None)
    x = batch(rank, 1).requires_grad_()
    said: list[BaseException] = []

    def ask(grad: Tensor, ddp: Any = late) -> None:
        try:
            ddp.skip_step()
        except RuntimeError as error:
            said.append(error)

    if rank == 0:
        late.module.register_full_backward_hook(lambda *_: ask(x))
    late(x).square().sum().backward()
    check(late.step_skipped and not said, "asked when all buckets were launched")


@on_ranks(2)
def test_skip_step_in_a_group_of_one_rank(rank: int, world: int) -> None:
    mine = [dist.new_group([r]) for r in range(world)][rank]
    ddp = DistributedDataParallel(make(), process_group=mine, on_failure="skip")
    backward(ddp, rank, 0)
    before = [p.detach().clone() for p in ddp.parameters()]
    ddp.skip_step().backward()
    _expect_skipped(ddp, before, "one rank")
    backward(ddp, rank, 1)
    check(not ddp.step_skipped and next(ddp.parameters()).grad is not None, "the next one counts")


@on_ranks(2)
def test_skip_step_under_join(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with ddp.join():
        for step in range(3 + 3 * rank):
            optimizer.zero_grad()
            if step % 2 == 1 and rank == 1:
                ddp.skip_step()
            backward(ddp, rank, step)
            check_equal(ddp.step_skipped, step % 2 == 1, f"step {step}")
            optimizer.step()
    check_same_on_all_ranks(list(ddp.parameters()), "after join()")


@pytest.mark.parametrize("delayed", [False, True], ids=["checked", "delayed"])
@on_ranks(2)
def test_failed_backward_inside_scale_loss_skips_on_all(
    rank: int, world: int, delayed: bool
) -> None:
    torch.manual_seed(rank)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0
    )
    ddp = DistributedDataParallel(model, on_failure="skip", message_size=20)
    fails = {0: "middle", 3: "below", 4: "last"}
    for step in range(7):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in ddp.parameters()]
        for micro in range(2 if delayed else 1):
            delay = delayed and micro == 0
            failing = step in fails and micro == 0
            if failing and rank == step % world:
                loss = _failing_loss(ddp, rank, step, fails[step]).float()
                with (
                    raises(MemoryError, "on purpose"),
                    amp.scale_loss(loss, optimizer, delay_overflow_check=delay) as scaled,
                ):
                    scaled.backward()
                while _handles:
                    _handles.pop().remove()
            else:
                loss = ddp(batch(rank, step)).float().square().sum() * 1e-3
                with amp.scale_loss(loss, optimizer, delay_overflow_check=delay) as scaled:
                    scaled.backward()
            if failing:
                _expect_skipped(ddp, before, f"step {step}")
        optimizer.step()
        changed = any(
            not torch.equal(p, old) for p, old in zip(ddp.parameters(), before, strict=True)
        )
        check_equal(changed, delayed or step not in fails, f"step {step} was taken")
        check_same_on_all_ranks(list(ddp.parameters()), f"step {step}")
        check_same_on_all_ranks(list(amp.master_params(optimizer)), f"masters, step {step}")
    scales = [scaler["loss_scale"] for scaler in amp.state_dict().values()]
    check_same_on_all_ranks([torch.tensor(scales)], "scales")
