# SPDX-License-Identifier: BSD-3-Clause
"""Steps that all ranks skip together, because one rank requests it or fails.

References: in the skipped step every rank has no gradient and unchanged parameters. In every
other step each gradient is the float64 mean over ranks, and parameters are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import Mlp
from ddp_steps_support import backward, batch, make, mean_gradients
from ddp_support import RankPool, check, check_equal, check_near, check_same_on_all_ranks, gradients
from ddp_support import raises as raises_in_rank
from torch import Tensor, nn

from apex import amp
from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def _hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


def _expect(ddp: nn.Module, expected: dict[str, Any], what: str) -> None:
    for name, grad in gradients(ddp).items():
        check_near(grad, expected[name], f"{what}, {name}", 1e-5)
    check_same_on_all_ranks([p.grad for p in ddp.parameters()], what)


def _expect_skipped(ddp: Any, before: list[Tensor], what: str) -> None:
    check(ddp.step_skipped, f"{what}: step_skipped is False")
    for (name, parameter), old in zip(ddp.named_parameters(), before, strict=True):
        check(parameter.grad is None, f"{what}: {name} has a gradient")
        check_equal(parameter.detach(), old, f"{what}: {name}")


def _no_loss(ddp: Any, rank: int, step: int) -> None:
    ddp.skip_step().backward()


def _own_loss(ddp: Any, rank: int, step: int) -> None:
    ddp.skip_step()
    (ddp(batch(rank, step)).square().sum() * float("nan")).backward()


def _in_backward(ddp: Any, rank: int, step: int) -> None:
    last = list(ddp.parameters())[-1]  # its gradient comes first
    handle = last.register_hook(lambda grad: (ddp.skip_step(), grad)[1])
    backward(ddp, rank, step)
    handle.remove()


WAYS: dict[str, Callable[[Any, int, int], None]] = {
    "no_loss": _no_loss,
    "own_loss": _own_loss,
    "in_backward": _in_backward,
}


def _skip(rank: int, world: int, way: str, hooked: bool) -> None:
    ddp = DistributedDataParallel(make(seed=rank), message_size=20)
    if hooked:
        ddp.register_comm_hook(None, _hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.1)
    skips = {0: 1, 3: 0, 4: 2, 7: 1}  # by step, the rank that requests the skip
    for step in range(10):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in ddp.parameters()]
        expected = mean_gradients(ddp.module, world, step)
        if skips.get(step) != rank:
            backward(ddp, rank, step)
        elif way == "in_backward" and step == 0 and hooked:
            _own_loss(ddp, rank, step)
        else:
            WAYS[way](ddp, rank, step)
        check_equal(ddp.step_skipped, step in skips, f"step {step}: step_skipped")
        if step in skips:
            _expect_skipped(ddp, before, f"step {step}")
        else:
            _expect(ddp, expected, f"step {step}")
        optimizer.step()
        check_same_on_all_ranks(list(ddp.parameters()), f"parameters after step {step}")
    check_equal(ddp.statistics()["steps_skipped"], len(skips), "steps_skipped")


@pytest.mark.parametrize("hooked", [False, True], ids=["all_reduce", "hook"])
@pytest.mark.parametrize("way", WAYS)
def test_skip_step_on_one_rank_skips_on_all(ranks: RankPool, way: str, hooked: bool) -> None:
    ranks.run(3, _skip, way, hooked)


def _checked(rank: int, world: int) -> None:
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


def test_steps_after_skipped_ones_may_differ_by_rank_and_are_compared(ranks: RankPool) -> None:
    ranks.run(2, _checked)


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
    if at == "first":
        handle = list(ddp.parameters())[-1].register_hook(lambda g: _Fails.backward(None, g))
    elif at == "middle":
        handle = list(ddp.parameters())[2].register_hook(lambda g: _Fails.backward(None, g))
    else:
        handle = next(iter(ddp.parameters())).register_hook(lambda g: _Fails.backward(None, g))
    _handles.append(handle)
    return ddp(x).square().sum()


_handles: list[Any] = []


class _Late(nn.Module):
    """A model with a layer that is initially unused on all ranks, or frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(6, 6), nn.Linear(6, 6)
        self.uses = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y + self.late(x) if self.uses else y


def _not_finite_late(rank: int, world: int, how: str, skips: bool) -> None:
    """The non-finite gradient belongs to a parameter outside of the bucket plan."""
    torch.manual_seed(0)
    model = _Late()
    if how == "frozen":
        model.late.requires_grad_(False)
        model.uses = True
    ddp = DistributedDataParallel(model, check_finite=True, on_failure="skip" if skips else "raise")
    for step in range(3):
        backward(ddp, rank, step)
        ddp.zero_grad()
    model.late.requires_grad_(True)
    model.uses = True
    if rank == 1:
        model.late.weight.register_hook(lambda grad: grad * float("inf"))
    loss = ddp(batch(rank, 4)).square().sum()
    if skips:
        loss.backward()
        _expect_skipped(ddp, [p.detach() for p in ddp.parameters()], how)
    else:
        with raises_in_rank(RuntimeError, "contributed a gradient that is infinite or NaN"):
            loss.backward()


@pytest.mark.parametrize("skips", [False, True], ids=["raises", "skips"])
@pytest.mark.parametrize("how", ["unused", "frozen"])
def test_late_gradient_that_is_not_finite_is_found(ranks: RankPool, how: str, skips: bool) -> None:
    ranks.run(2, _not_finite_late, how, skips)


def _refused(rank: int, world: int) -> None:
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


def test_skip_step_where_it_cannot_work_is_refused(ranks: RankPool) -> None:
    ranks.run(2, _refused)


def _alone(rank: int, world: int) -> None:
    mine = [dist.new_group([r]) for r in range(world)][rank]
    ddp = DistributedDataParallel(make(), process_group=mine, on_failure="skip")
    backward(ddp, rank, 0)
    before = [p.detach().clone() for p in ddp.parameters()]
    ddp.skip_step().backward()
    _expect_skipped(ddp, before, "one rank")
    backward(ddp, rank, 1)
    check(not ddp.step_skipped and next(ddp.parameters()).grad is not None, "the next one counts")


def test_skip_step_in_a_group_of_one_rank(ranks: RankPool) -> None:
    ranks.run(2, _alone)


def _join(rank: int, world: int) -> None:
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


def test_skip_step_under_join(ranks: RankPool) -> None:
    ranks.run(2, _join)


def _amp(rank: int, world: int, level: str) -> None:
    torch.manual_seed(rank)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0
    )
    ddp = DistributedDataParallel(model)
    for step in range(6):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in ddp.parameters()]
        skips = step in (0, 3)
        loss = (
            ddp.skip_step()
            if skips and rank == 1
            else ddp(batch(rank, step)).float().square().sum()
        )
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        if skips:
            _expect_skipped(ddp, before, f"step {step}")
        else:
            changed = any(
                not torch.equal(p, old) for p, old in zip(ddp.parameters(), before, strict=True)
            )
            check(changed, f"step {step} was taken")
        check_same_on_all_ranks(list(ddp.parameters()), f"step {step}")
        check_same_on_all_ranks(list(amp.master_params(optimizer)), f"masters, step {step}")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_skip_step_with_amp(ranks: RankPool, level: str) -> None:
    ranks.run(2, _amp, level)


def _amp_failing(rank: int, world: int, delayed: bool) -> None:
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


@pytest.mark.parametrize("delayed", [False, True], ids=["checked", "delayed"])
def test_failed_backward_inside_scale_loss_skips_on_all(ranks: RankPool, delayed: bool) -> None:
    ranks.run(2, _amp_failing, delayed)


def _grad_scaler(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make(seed=rank))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for step in range(6):
        optimizer.zero_grad()
        skips = step == 2 and rank == 0
        loss = ddp.skip_step() if skips else ddp(batch(rank, step)).square().sum()
        scaler.scale(loss).backward()
        if ddp.step_skipped:
            continue
        scaler.step(optimizer)
        scaler.update()
        check_same_on_all_ranks(list(ddp.parameters()), f"step {step}")
    check_equal(scaler.get_scale(), 4.0, "scale")


def test_skip_step_with_grad_scaler(ranks: RankPool) -> None:
    ranks.run(2, _grad_scaler)
