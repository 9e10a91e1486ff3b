# SPDX-License-Identifier: BSD-3-Clause
"""One rank's backward fails, early or when all its gradients are ready. Every rank raises, and
every later backward is correct.

References: each exchange ends within the group's timeout, and check_step()'s averages in float64.
"""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import build, data
from ddp_support import (
    RankPool,
    check_equal,
    check_same_on_all_ranks,
    check_step,
    host_channel,
    raises,
)
from torch import Tensor, nn

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


def _result_is_refused(rank: int, world: int, changes: bool) -> None:
    """Rank 0's hook yields too few elements, or the last rank alone has frozen a parameter, of
    which every rank is notified first."""
    ddp = DistributedDataParallel(build(), process_group=_group(), message_size=20)
    fails = [False]

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        future = _average(world, bucket)
        return future.then(lambda f: f.value()[1:]) if fails[0] and rank == 0 else future

    ddp.register_comm_hook(None, hook)
    for step in range(5):
        fails[0] = step == 2
        if not fails[0]:
            check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"step {step}")
            continue
        if changes and rank == world - 1:
            ddp.module.layers[1].weight.requires_grad_(False)
        ddp.zero_grad()
        if changes:
            with raises(RuntimeError, f"'layers.1.weight' is frozen on rank {world - 1}"):
                _loss(ddp, rank, step).backward()
        elif rank == 0:
            with raises(Exception, "elements"):
                _loss(ddp, rank, step).backward()
        else:
            _loss(ddp, rank, step).backward()
        ddp.zero_grad()
        ddp.module.layers[1].weight.requires_grad_(True)


@pytest.mark.parametrize("changes", [False, True], ids=["alone", "frozen"])
@pytest.mark.parametrize("world", [2, 3])
def test_result_of_a_hook_that_one_rank_refuses(ranks: RankPool, world: int, changes: bool) -> None:
    ranks.run(world, _result_is_refused, changes)


def _hook_fails(rank: int, world: int, way: str, at: int, everywhere: bool, shared: bool) -> None:
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


@pytest.mark.parametrize("shared", [True, False], ids=["shared_memory", "sockets"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["rank_1", "every_rank"])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("way", ["raises", "future"])
def test_hook_that_fails_ends_the_wrapper_on_every_rank(
    ranks: RankPool, way: str, at: int, everywhere: bool, shared: bool
) -> None:
    ranks.run(3, _hook_fails, way, at, everywhere, shared)


def _hook_is_interrupted(rank: int, world: int) -> None:
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


def test_hook_that_is_interrupted_interrupts_backward(ranks: RankPool) -> None:
    ranks.run(2, _hook_is_interrupted)


def _wrong_size(rank: int, world: int) -> None:
    """Rank 1's hook yields too few elements and skips its collective. Its error must report this,
    and not that the others are missing."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    ddp = DistributedDataParallel(build(), process_group=group, message_size=20)

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        if rank == 1 and bucket.index() == 1:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer()[1:])
            return future
        return _average(world, bucket, group)

    ddp.register_comm_hook(None, hook)
    with raises(RuntimeError if rank == 0 else Exception, "" if rank == 0 else "elements"):
        _loss(ddp, rank).backward()
        _loss(ddp, rank).backward()


def test_hook_of_another_size_on_one_rank_says_so_there(ranks: RankPool) -> None:
    ranks.run(2, _wrong_size)


def _fail(_: Tensor) -> None:
    raise ArithmeticError("in backward")


def _chained_hook(rank: int, world: int, failing: int, at: int) -> None:
    """Each bucket takes two collectives. The failing rank launches the remaining buckets in the
    order of its peers, so after the second collective of the previous bucket."""
    group = _group()
    ddp = DistributedDataParallel(build(), process_group=group, message_size=20)

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(world)

        def rest(f: Any) -> Tensor:
            dist.all_reduce(buffer[1:], group=group, async_op=True).get_future().wait()
            return buffer

        return dist.all_reduce(buffer[:1], group=group, async_op=True).get_future().then(rest)

    ddp.register_comm_hook(None, hook)
    for step in range(6):
        if step not in (1, 3, 4):
            check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"step {step}")
            continue
        ddp.zero_grad()
        handle = None
        if rank == failing:
            handle = ddp.module.layers[at].bias.register_hook(_fail)
        with raises(Exception, "in backward" if rank == failing else "ended by an exc"):
            _loss(ddp, rank, step).backward()
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_chained_hook_when_one_backward_fails_leaves_the_next_step_right(
    ranks: RankPool, failing: int, at: int
) -> None:
    ranks.run(3, _chained_hook, failing, at)


# --- allreduce_buffers when plans change ---


def _buffers_hold_gradients(rank: int, world: int, dtype: torch.dtype, always_fp32: bool) -> None:
    """Freezes in a repeating pattern, and uses a layer late."""
    model = build().to(dtype)
    ddp = DistributedDataParallel(
        model,
        process_group=_group(),
        retain_allreduce_buffers=True,
        message_size=20,
        allreduce_always_fp32=always_fp32,
    )
    for step in range(12):
        for i, layer in enumerate(model.layers):
            frozen = step >= 2 and i == step % 2
            layer.weight.requires_grad_(not frozen)
        used = [0, 1] if step == 0 else [0, 1, 2]
        ddp.zero_grad()
        ddp(data(rank, step).to(dtype), used).square().sum().backward()
        buffers = ddp.allreduce_buffers
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        what = f"step {step}"
        check_equal(sum(b.numel() for b in buffers) >= sum(g.numel() for g in grads), True, what)
        ends = [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in buffers]
        for grad in grads:
            there = any(
                a <= grad.data_ptr() and grad.data_ptr() + grad.nbytes <= b for a, b in ends
            )
            check_equal(there, True, f"a gradient lies in a buffer, {what}")
        have = torch.cat([b.flatten().double() for b in buffers]).norm()
        want = torch.cat([g.flatten().double() for g in grads]).norm()
        check_equal(torch.allclose(have, want, rtol=1e-12), True, f"norm of the buffers, {what}")
        check_same_on_all_ranks([p.grad for p in model.parameters()], what)


@pytest.mark.parametrize(
    ("dtype", "always_fp32"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["float32", "bfloat16", "bfloat16_as_float32"],
)
def test_buffers_hold_the_gradients_when_the_plan_changes(
    ranks: RankPool, dtype: torch.dtype, always_fp32: bool
) -> None:
    ranks.run(2, _buffers_hold_gradients, dtype, always_fp32)


def _unused_here_is_a_view(rank: int, world: int, change: str) -> None:
    """Gradients that are zeroed in place, a new plan, and a layer that rank 1 does not use."""
    model = build()
    ddp = DistributedDataParallel(model, process_group=_group(), retain_allreduce_buffers=True)
    for step in range(5):
        if step == 2 and change == "rebuild_buckets":
            ddp.rebuild_buckets()
        if step == 2 and change == "freeze":
            model.layers[0].bias.requires_grad_(False)
        ddp.zero_grad(set_to_none=False)
        used = [0, 1, 2] if rank == 0 or step < 2 else [0, 1]
        ddp(data(rank, step), used).square().sum().backward()
        for buffer in ddp.allreduce_buffers:
            buffer.mul_(0.5)  # as an Apex script clips
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        check_same_on_all_ranks(grads, f"scaled gradients, step {step}")


@pytest.mark.parametrize("change", ["rebuild_buckets", "freeze"])
def test_buffers_hold_gradients_that_a_rank_does_not_use(ranks: RankPool, change: str) -> None:
    ranks.run(2, _unused_here_is_a_view, change)
