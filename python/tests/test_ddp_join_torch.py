# SPDX-License-Identifier: BSD-3-Clause
"""Uneven inputs under torch.distributed.algorithms.join.Join, alone and together with
a sharded optimizer."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_join_support import Counter, Normed, batch, make, reference_step
from ddp_models import Mlp
from ddp_support import (
    RankPool,
    check,
    check_equal,
    check_near,
    check_same_on_all_ranks,
    gradients,
    raises,
    to_reference,
)
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.optim import ZeroRedundancyOptimizer

from apex.parallel import DistributedDataParallel, SyncBatchNorm

pytestmark = pytest.mark.processes

RATE = 0.01
LONG_S = 120


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def check_is_ordinary_again(ddp: DistributedDataParallel, rank: int) -> None:
    """No rank waits for announcements or makes one any more."""
    ddp.zero_grad()
    loss_of(ddp(batch(rank, 0))).backward()
    check_same_on_all_ranks([p.grad for p in ddp.parameters()], "after Join")
    with ddp.join():
        loss_of(ddp(batch(rank, 0))).backward()


def _follows_reference(
    rank: int, world: int, counts: list[int], sharded: bool, initial: bool, options: dict[str, Any]
) -> None:
    ddp = DistributedDataParallel(make(), **options)
    reference = to_reference(ddp.module)
    optimizer: Any
    if sharded:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=RATE)
        joinables = [ddp, optimizer]
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
        joinables = [ddp]
    mine = []
    with Join(joinables, divide_by_initial_world_size=initial):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
            mine.append(gradients(ddp))
            optimizer.step()
    for step in range(max(counts)):
        active = [r for r in range(world) if step < counts[r]]
        expected = reference_step(
            reference, active, world if initial else len(active), [step], RATE
        )
        if step < counts[rank]:
            for name, grad in mine[step].items():
                check_near(grad, expected[name], f"step {step}, {name}", 1e-4)
    for (name, parameter), wanted in zip(
        ddp.module.named_parameters(), reference.parameters(), strict=True
    ):
        check_near(parameter, wanted, f"final {name}", 1e-4)
    check_same_on_all_ranks([p.data for p in ddp.parameters()], "final parameters")
    check_is_ordinary_again(ddp, rank)


OPTIONS = [
    {},
    {"message_size": 1, "gradient_as_bucket_view": True},
    {"message_size": 30, "allreduce_always_fp32": True},
    {"delay_allreduce": True, "check_reduction": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "default")
@pytest.mark.parametrize("initial", [True, False], ids=["by_world", "by_active"])
@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "alone"])
def test_torch_join_uneven_counts_equal_one_process(
    ranks: RankPool, sharded: bool, initial: bool, options: dict[str, Any]
) -> None:
    ranks.run(3, _follows_reference, [2, 5, 3], sharded, initial, options, timeout_s=LONG_S)


@pytest.mark.parametrize("counts", [[0, 2], [2, 0], [3, 3], [0, 0], [1, 4]], ids=str)
@pytest.mark.parametrize("sharded", [True, False], ids=["zero", "alone"])
def test_torch_join_any_counts_equal_one_process(
    ranks: RankPool, sharded: bool, counts: list[int]
) -> None:
    ranks.run(2, _follows_reference, counts, sharded, True, {}, timeout_s=LONG_S)


# --- accumulation, batch norm, buffers ---


def _accumulates(rank: int, world: int) -> None:
    counts = [2, 6]
    ddp = DistributedDataParallel(make(), message_size=30)
    reference = to_reference(ddp.module)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=RATE)
    with Join([ddp, optimizer]):
        for step in range(0, counts[rank], 2):
            optimizer.zero_grad()
            with ddp.no_sync():
                loss_of(ddp(batch(rank, step))).backward()
            loss_of(ddp(batch(rank, step + 1))).backward()
            optimizer.step()
    for step in range(0, max(counts), 2):
        active = [r for r in range(world) if step < counts[r]]
        reference_step(reference, active, world, [step, step + 1], RATE)
    for (name, parameter), wanted in zip(
        ddp.module.named_parameters(), reference.parameters(), strict=True
    ):
        check_near(parameter, wanted, f"final {name}", 1e-4)


def test_torch_join_with_accumulation_equals_one_process(ranks: RankPool) -> None:
    ranks.run(2, _accumulates, timeout_s=LONG_S)


def _normalizes(rank: int, world: int) -> None:
    counts = [1, 4, 2]
    torch.manual_seed(0)
    model = Normed(SyncBatchNorm)
    torch.manual_seed(0)
    reference = Normed(nn.BatchNorm1d).double()
    ddp = DistributedDataParallel(model)
    with Join([ddp], divide_by_initial_world_size=False):
        for step in range(counts[rank]):
            ddp.zero_grad()
            torch.sin(ddp(batch(rank, step))).sum().backward()
            active = [r for r in range(world) if step < counts[r]]
            reference.zero_grad()
            whole = torch.cat([batch(r, step) for r in active]).double()
            (torch.sin(reference(whole)).sum() / len(active)).backward()
            expected = gradients(reference)
            for name, grad in gradients(ddp).items():
                check_near(grad, expected[name], f"step {step}, {name}", 2e-3, scale=1.0)
    check_same_on_all_ranks(list(model.buffers()), "buffers")
    # Outside of the join, batch norms announce nothing.
    ddp.zero_grad()
    ddp(batch(rank, 0)).sum().backward()


def test_torch_join_sync_batch_norm_equals_one_process(ranks: RankPool) -> None:
    ranks.run(3, _normalizes, timeout_s=LONG_S)


def _broadcasts_buffers(rank: int, world: int) -> None:
    counts = [1, 3]
    ddp = DistributedDataParallel(Counter(), broadcast_buffers=True)
    with Join([ddp]):
        for step in range(counts[rank]):
            ddp(batch(rank, step)).sum().backward()
    # Step 0: rank 0's buffer is broadcast. Then only rank 1 is left, with its own.
    seen = batch(1, 0).sum() + batch(1, 1).sum() + batch(1, 2).sum()
    check_near(ddp.module.seen, seen, "buffer", 1e-4)


def test_torch_join_broadcast_buffers_from_a_rank_with_data(ranks: RankPool) -> None:
    ranks.run(2, _broadcasts_buffers)


# --- the edges ---


def _throws(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    try:
        with Join([ddp], throw_on_early_termination=True):
            for step in range([1, 4][rank]):
                ddp(batch(rank, step)).sum().backward()
    except RuntimeError as error:
        check("exhausted" in str(error), str(error))
    else:
        raise AssertionError("nothing was raised")
    gc.collect()
    check(ddp._engine.join is None, "the wrapper is left in a Join that has ended")
    check_is_ordinary_again(ddp, rank)


def test_torch_join_throw_on_early_termination_raises_on_all(ranks: RankPool) -> None:
    ranks.run(2, _throws)


def _is_refused(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    check(isinstance(ddp, Joinable), "not a Joinable")
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=RATE)
    with raises(ValueError, "first"):
        Join([optimizer, ddp])
    with raises(ValueError, "only one"):
        Join([DistributedDataParallel(make()), ddp])
    with ddp.join(), raises(RuntimeError, "torch's Join was entered inside"):
        Join([ddp])
    with raises(RuntimeError, "join() was entered inside another join()"), Join([ddp]), ddp.join():
        pass
    gc.collect()

    with Join([ddp], enable=False):
        loss_of(ddp(batch(rank, 0))).backward()
    check_is_ordinary_again(ddp, rank)

    with raises(RuntimeError, "0 synchronized backwards", "join()"), Join([ddp]):
        ddp(batch(rank, 0))
        ddp(batch(rank, 1))
    gc.collect()
    with raises(RuntimeError, "2 synchronized backwards"), Join([ddp]):
        loss = loss_of(ddp(batch(rank, 0)))
        loss.backward(retain_graph=True)
        loss.backward()
        ddp(batch(rank, 1))
    gc.collect()
    check_is_ordinary_again(ddp, rank)

    careful = DistributedDataParallel(make(), check_reduction=True)
    with raises(RuntimeError, "check_reduction"), Join([careful]), careful.no_sync():
        careful(batch(rank, 0))
    normed = DistributedDataParallel(Normed(SyncBatchNorm))
    with raises(RuntimeError, "SyncBatchNorm in no_sync()"), Join([normed]), normed.no_sync():
        normed(batch(rank, 0))
    gc.collect()
    dist.barrier()


def test_torch_join_what_ranks_without_data_cannot_follow_is_refused(ranks: RankPool) -> None:
    ranks.run(2, _is_refused)


def _is_silent(rank: int, world: int) -> None:
    """Evaluation involves no other rank."""
    ddp = DistributedDataParallel(Mlp())
    with Join([ddp]):
        for step in range([1, 3][rank]):
            loss_of(ddp(batch(rank, step))).backward()
            with torch.no_grad():
                ddp(batch(rank, step))
    check_equal(ddp._engine.join, None, "the wrapper's join")


def test_torch_join_evaluation_announces_nothing(ranks: RankPool) -> None:
    ranks.run(2, _is_silent)
