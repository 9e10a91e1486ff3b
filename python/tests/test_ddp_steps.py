# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that are out of step: by default, every rank raises in the first such step.

The reference is the operation injected on rank 1. The error names the rank and it, on every
rank."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import backward, batch, make
from ddp_support import check_equal, check_same_on_all_ranks, notices, on_ranks, raises

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def _train(ddp: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    backward(ddp, rank, step)
    optimizer.step()


def _skips_backward_and_steps(ddp: Any, optimizer: Any, rank: int) -> None:
    ddp(batch(rank, 9))
    optimizer.step()


def _forward_without_gradients(ddp: Any, optimizer: Any, rank: int) -> None:
    with torch.no_grad():
        ddp(batch(rank, 9))
    optimizer.step()


def _local_step(ddp: Any, optimizer: Any, rank: int) -> None:
    with ddp.no_sync():
        _train(ddp, optimizer, rank, 9)


MISSTEPS = {
    "skipped backward, and a step": (
        _skips_backward_and_steps,
        "rank 1 made another number of optimizer steps",
    ),
    "forward without gradients": (
        _forward_without_gradients,
        "rank 1 made another number of optimizer steps",
    ),
    "local step": (_local_step, "rank 1 made another number of optimizer steps"),
}


@pytest.mark.parametrize("options", [{}, {"message_size": 1}, {"gradient_as_bucket_view": True},
                                     {"check_reduction": True, "static_graph": True}],
                         ids=["one_bucket", "alone", "views", "static_graph"])  # fmt: skip
@pytest.mark.parametrize("fused", [False, True], ids=["sgd", "fused"])
@pytest.mark.parametrize("misstep", MISSTEPS)
@on_ranks(3)
def test_ranks_out_of_step_raise_on_all(
    rank: int, world: int, misstep: str, fused: bool, options: dict[str, Any]
) -> None:
    """Rank 1 does something else before step 3. Every rank raises in that step and names it."""
    act, said = MISSTEPS[misstep]
    ddp = DistributedDataParallel(make(seed=rank), **options)
    kind = {"fused": True} if fused else {"momentum": 0.9}
    optimizer = (torch.optim.AdamW if fused else torch.optim.SGD)(ddp.parameters(), lr=0.1, **kind)
    for step in range(3):
        _train(ddp, optimizer, rank, step)
    if rank == 1:
        act(ddp, optimizer, rank)
    with raises(RuntimeError, f"rank {rank}: the ranks are out of step", said):
        _train(ddp, optimizer, rank, 3)
    dist.barrier()  # a rank whose wrapper is gone has left


@on_ranks(3)
def test_extra_backward_on_one_rank_raises_on_all(rank: int, world: int) -> None:
    """Rank 1's extra backward meets the others' step. All ranks raise there."""
    ddp = DistributedDataParallel(make(seed=rank))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    said = "the ranks are out of step: rank 0, rank 2 updated the parameters since"
    with raises(RuntimeError, said, "rank 1 did not"):
        for step in range(5):
            optimizer.zero_grad()
            loss = ddp(batch(rank, step)).square().sum()
            loss.backward(retain_graph=True)
            if rank == 1 and step == 2:
                loss.backward()
            optimizer.step()
    dist.barrier()


@on_ranks(2)
def test_check_reduction_off_does_not_raise(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make(), check_reduction=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    backward(ddp, rank, 0)
    if rank == 1:
        optimizer.step()
        optimizer.step()
    backward(ddp, rank, 1)


SINCE = "since construction or the last synchronized backward"
ONCE_MORE = f"rank 1 updated the parameters {SINCE}, rank 0 did not"
LOCALLY = "rank 1 made another number of optimizer steps"
# By name: the losses that rank 0 uses in step 2, and the wrapper that is in no_sync().
DEEDS = {
    "second_once_more": ([0, 1, 1], None, ONCE_MORE),
    "first_once_more": ([0, 0, 1], None, ONCE_MORE),
    "no_sync_of_the_second": ([0, 1], 1, LOCALLY),
    "no_sync_of_the_first": ([0, 1], 0, LOCALLY),
}


@pytest.mark.parametrize("name", DEEDS)
@on_ranks(2)
def test_out_of_step_in_one_of_several_wrappers(rank: int, world: int, name: str) -> None:
    """A deadlock would hit the pool's limit, which is above the timeout here."""
    wrappers = [DistributedDataParallel(make(i)) for i in range(2)]
    parameters = [p for wrapper in wrappers for p in wrapper.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    losses, quiet, said = DEEDS[name]
    with raises(RuntimeError, f"the ranks are out of step: {said}"):
        for step in range(5):
            optimizer.zero_grad()
            mine = losses if rank == 0 and step == 2 else [0, 1]
            with contextlib.ExitStack() as stack:
                if quiet is not None and rank == 0 and step == 2:
                    stack.enter_context(wrappers[quiet].no_sync())
                outputs = [wrapper(batch(rank, step)) for wrapper in wrappers]
                sum(outputs[i].square().sum() for i in sorted(set(mine))).backward()
                if len(mine) > 2:
                    wrappers[mine[1]](batch(rank, step)).square().sum().backward()
            optimizer.step()
    dist.barrier()


@on_ranks(2)
def test_step_after_local_backward_on_every_rank_warns_once(rank: int, world: int) -> None:
    """The synchronized micro-batch is the second of three, and the step follows the third."""
    ddp = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with notices(rank == 0) as texts:
        for step in range(12):
            with contextlib.nullcontext() if step % 3 == 1 else ddp.no_sync():
                backward(ddp, rank, step)
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    said = [text for text in texts if "outside of no_sync()" in text]
    check_equal(len(said), 1 if rank == 0 else 0, f"notices in {texts}")
    check_equal(len(texts), len(said), f"other notices in {texts}")


@on_ranks(2)
def test_sharpness_aware_minimization_is_silent(rank: int, world: int) -> None:
    """Sharpness-aware minimization, as in issue threads: perturbed by this rank's gradient."""
    ddp = DistributedDataParallel(make(), message_size=20)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with notices() as texts:
        for step in range(20):
            with ddp.no_sync():
                backward(ddp, rank, step)
            before = [p.detach().clone() for p in ddp.parameters()]
            with torch.no_grad():
                for p in ddp.parameters():
                    p.add_(p.grad, alpha=0.01)
            optimizer.zero_grad()
            backward(ddp, rank, step)
            with torch.no_grad():
                for p, value in zip(ddp.parameters(), before, strict=True):
                    p.copy_(value)
            optimizer.step()
    check_same_on_all_ranks(list(ddp.parameters()), "parameters")
    check_equal(texts, [], "notices")


@on_ranks(2)
def test_optimizers_made_for_one_step_do_not_raise(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    kept = []
    for step in range(20):
        ddp.zero_grad()
        backward(ddp, rank, step)
        for parameter in ddp.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.001)
            optimizer.step()
            if rank == 1:
                kept.append(optimizer)  # on the other rank, the next optimizer reuses its id()
    check_same_on_all_ranks(list(ddp.parameters()), "optimizers made for one step")
