# SPDX-License-Identifier: BSD-3-Clause
"""Steps that all ranks skip together, because one rank requests it or fails.

References: in the skipped step every rank has no gradient and unchanged parameters. In every
other step each gradient is the float64 mean over ranks, and parameters are bitwise equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import Mlp, backward, batch, make
from ddp_support import check, check_equal, check_same_on_all_ranks, on_ranks
from ddp_support import raises as raises_in_rank
from torch import Tensor

from apex import amp
from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


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
        if step % 2 == 1 and rank == 0:
            ddp.skip_step().backward()
            continue
        backward(ddp, rank, step)
        optimizer.step()
    if rank == 1:
        with torch.no_grad():
            next(ddp.parameters()).add_(1)
    with raises_in_rank(RuntimeError, "the ranks are out of step: rank 1 updated the parameters"):
        backward(ddp, rank, 20)
        backward(ddp, rank, 21)


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise MemoryError("on purpose")


def _failing_loss(ddp: Any, rank: int, step: int, at: str) -> Tensor:
    x = batch(rank, step).requires_grad_()
    if at == "below":  # when all gradients are ready
        return ddp(_Fails.apply(x)).square().sum()
    if at == "middle":
        handle = list(ddp.parameters())[2].register_hook(lambda g: _Fails.backward(None, g))
    else:
        handle = next(iter(ddp.parameters())).register_hook(lambda g: _Fails.backward(None, g))
    _handles.append(handle)
    return ddp(x).square().sum()


_handles: list[Any] = []


@on_ranks(2)
def test_skip_step_where_it_cannot_work_is_refused(rank: int, world: int) -> None:
    with raises_in_rank(ValueError, "on_failure must be 'raise' or 'skip', got 'ignore'"):
        DistributedDataParallel(make(), on_failure="ignore")
    with raises_in_rank(RuntimeError, "on_failure='skip' (skip_failed_steps)"):
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
                    raises_in_rank(MemoryError, "on purpose"),
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
