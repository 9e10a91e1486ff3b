# SPDX-License-Identifier: BSD-3-Clause
"""Uneven inputs: join() with gradients, buffers, SyncBatchNorm, scalers, accumulation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_join_support import Counter, Normed, batch, make, reference_step
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
from nccl_like import unnamed_backends
from torch import nn

from apex.parallel import DistributedDataParallel, SyncBatchNorm

pytestmark = pytest.mark.processes


def _follows_reference(
    rank: int, world: int, counts: list[int], initial: bool, options: dict[str, Any]
) -> None:
    ddp = DistributedDataParallel(make(), **options)
    reference = to_reference(ddp.module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    mine = []
    with ddp.join(divide_by_initial_world_size=initial):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().sum().backward()
            mine.append(gradients(ddp))
            optimizer.step()
    for step in range(max(counts)):
        active = [r for r in range(world) if step < counts[r]]
        expected = reference_step(
            reference, active, world if initial else len(active), [step], 0.01
        )
        if step < counts[rank]:
            for name, grad in mine[step].items():
                check_near(grad, expected[name], f"step {step}, {name}", 1e-4)
    for (name, parameter), wanted in zip(
        ddp.module.named_parameters(), reference.parameters(), strict=True
    ):
        check_near(parameter, wanted, f"final {name}", 1e-4)
    check_same_on_all_ranks([p.data for p in ddp.parameters()], "final parameters")
    # Afterwards it is an ordinary wrapper again.
    ddp.zero_grad()
    ddp(batch(rank, 0)).square().sum().backward()
    check_same_on_all_ranks([p.grad for p in ddp.parameters()], "after join()")


OPTIONS = [
    {},
    {"message_size": 1, "gradient_as_bucket_view": True},
    {"message_size": 30, "allreduce_always_fp32": True},
    {"gradient_predivide_factor": 2.0},
    {"delay_allreduce": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "default")
@pytest.mark.parametrize("initial", [True, False], ids=["by_world", "by_active"])
def test_join_uneven_counts_equal_one_process(
    ranks: RankPool, initial: bool, options: dict[str, Any]
) -> None:
    ranks.run(3, _follows_reference, [2, 5, 3], initial, options)


@pytest.mark.parametrize("counts", [[0, 2], [2, 0], [3, 3], [0, 0], [1, 4]], ids=str)
def test_join_any_counts_equal_one_process(ranks: RankPool, counts: list[int]) -> None:
    ranks.run(2, _follows_reference, counts, True, {})


# --- accumulation, several backwards ---


def _accumulates(rank: int, world: int) -> None:
    counts = [2, 6]
    ddp = DistributedDataParallel(make(), message_size=30)
    reference = to_reference(ddp.module)
    with ddp.join():
        for step in range(0, counts[rank], 2):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(batch(rank, step)).square().sum().backward()
            output = ddp(batch(rank, step + 1))
            output.square().sum().backward()
            active = [r for r in range(world) if step < counts[r]]
            expected = reference_step(reference, active, world, [step, step + 1], 0.0)
            for name, grad in gradients(ddp).items():
                check_near(grad, expected[name], f"step {step}, {name}", 1e-4)


def test_join_with_accumulation_equals_one_process(ranks: RankPool) -> None:
    ranks.run(2, _accumulates)


# --- batch norm and buffers ---


def _normalizes(rank: int, world: int, accumulate: bool) -> None:
    counts = [1, 4, 2]
    torch.manual_seed(0)
    model = Normed(SyncBatchNorm)
    torch.manual_seed(0)
    reference = Normed(nn.BatchNorm1d).double()
    ddp = DistributedDataParallel(model)
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(counts[rank]):
            ddp.zero_grad()
            if accumulate:
                with ddp.no_sync():
                    (0.5 * torch.sin(ddp(batch(rank, step)))).sum().backward()
                (0.5 * torch.sin(ddp(batch(rank, step)))).sum().backward()
            else:
                torch.sin(ddp(batch(rank, step))).sum().backward()
            active = [r for r in range(world) if step < counts[r]]
            reference.zero_grad()
            for _ in range(2 if accumulate else 1):
                whole = torch.cat([batch(r, step) for r in active]).double()
                loss = torch.sin(reference(whole)).sum() / len(active)
                (loss * (0.5 if accumulate else 1.0)).backward()
            expected = gradients(reference)
            for name, grad in gradients(ddp).items():
                check_near(grad, expected[name], f"step {step}, {name}", 2e-3, scale=1.0)
    # Running statistics come from the rank that trained to the end.
    for step in range(counts[rank], max(counts)):
        active = [r for r in range(world) if step < counts[r]]
        for _ in range(2 if accumulate else 1):
            reference(torch.cat([batch(r, step) for r in active]).double())
    check_same_on_all_ranks(list(model.buffers()), "buffers")
    for name, value in model.named_buffers():
        if value.is_floating_point():
            check_near(value, dict(reference.named_buffers())[name], name, 1e-4)


@pytest.mark.parametrize("accumulate", [False, True])
def test_join_sync_batch_norm_equals_one_process(ranks: RankPool, accumulate: bool) -> None:
    ranks.run(3, _normalizes, accumulate)


def _normalizes_with_a_backend_for_each_device(rank: int, world: int) -> None:
    with unnamed_backends():
        _normalizes(rank, world, accumulate=False)


def test_join_with_backends_for_cpu_and_gpu_talks_where_the_module_is(ranks: RankPool) -> None:
    ranks.run(3, _normalizes_with_a_backend_for_each_device)


def _fails_in_backward(rank: int, world: int) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Normed(SyncBatchNorm))
    steps = 0

    def hook(gradient: torch.Tensor) -> None:
        if rank == 1 and steps == 1:
            raise ArithmeticError("the script's own")

    ddp.module.b.weight.register_hook(hook)  # a batch norm's backward comes after it
    expected = ArithmeticError if rank == 1 else RuntimeError
    with raises(expected), ddp.join():
        for steps in range([1, 3, 3][rank]):
            ddp.zero_grad()
            torch.sin(ddp(batch(rank, steps))).sum().backward()


def test_join_exception_in_backward_before_a_batch_norms_ends_all_ranks(ranks: RankPool) -> None:
    ranks.run(3, _fails_in_backward)


def _broadcasts_buffers(rank: int, world: int) -> None:
    counts = [1, 3]
    ddp = DistributedDataParallel(Counter(), broadcast_buffers=True)
    with ddp.join():
        for step in range(counts[rank]):
            ddp(batch(rank, step)).sum().backward()
    # Step 0: rank 0's buffer is broadcast. Then only rank 1 is left, with its own.
    seen = batch(1, 0).sum() + batch(1, 1).sum() + batch(1, 2).sum()
    check_near(ddp.module.seen, seen, "buffer", 1e-4)


def test_join_broadcast_buffers_from_a_rank_with_data(ranks: RankPool) -> None:
    ranks.run(2, _broadcasts_buffers)


def _keeps_sparse_buffers(rank: int, world: int) -> None:
    model = make()
    model.register_buffer("adjacency", (torch.eye(3) * (rank + 1)).to_sparse())
    model.register_buffer("flag", torch.tensor(rank))
    ddp = DistributedDataParallel(model)
    with ddp.join():
        for step in range(1 + rank):
            ddp(batch(rank, step)).sum().backward()
    check_equal(model.flag.item(), world - 1, "a buffer, of the last rank with data")
    check_equal(model.adjacency.to_dense().sum().item(), 3.0 * (rank + 1), "a sparse buffer")


def test_join_leaves_sparse_buffers_alone(ranks: RankPool) -> None:
    ranks.run(2, _keeps_sparse_buffers)


# --- scalers ---


def _scales(rank: int, world: int) -> None:
    counts = [1, 4]
    ddp = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with ddp.join(scalers=[scaler]):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            scaler.scale(ddp(batch(rank, step)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    check(scaler.get_scale() == 8.0 * 2**4, f"scale {scaler.get_scale()}")


def test_join_takes_over_the_scaler(ranks: RankPool) -> None:
    ranks.run(2, _scales)


def _scales_on_one_rank(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    scalers = [torch.amp.GradScaler("cpu")] * rank
    try:
        with ddp.join(scalers=scalers):
            for step in range(1 + rank):
                ddp(batch(rank, step)).sum().backward()
    except RuntimeError as error:
        text = f"rank {rank}: at the end of join() this rank has {rank} loss scalers"
        check(text in str(error), str(error))
    else:
        raise AssertionError("nothing was raised")


def test_join_other_numbers_of_scalers_raise_on_all(ranks: RankPool) -> None:
    ranks.run(2, _scales_on_one_rank)


# --- the edges ---


def _throws(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    try:
        with ddp.join(throw_on_early_termination=True):
            for step in itertools.count() if rank == 1 else range(1):
                ddp(batch(rank, step)).sum().backward()
    except RuntimeError as error:
        check("ranks [0] have run out of data" in str(error), str(error))
    else:
        raise AssertionError("nothing was raised")


def test_join_throw_on_early_termination_raises_on_all(ranks: RankPool) -> None:
    ranks.run(2, _throws)


def _is_disabled(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    with ddp.join(enable=False):
        ddp(batch(rank, 0)).sum().backward()
    check_same_on_all_ranks([p.grad for p in ddp.parameters()], "gradients")
    with ddp.join():
        try:
            with ddp.join():
                pass
        except RuntimeError as error:
            check("join() was entered inside another join()" in str(error), str(error))
        else:
            raise AssertionError("nesting was not refused")


def test_join_disabled_and_nested(ranks: RankPool) -> None:
    ranks.run(2, _is_disabled)


def _disagrees(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    try:
        with ddp.join():
            output = ddp(batch(rank, 0))
            if rank == 0:
                ddp(batch(rank, 1))  # a second forward, while rank 1 runs backward
            output.sum().backward()
    except RuntimeError as error:
        check("are in different calls" in str(error), str(error))
    else:
        raise AssertionError("nothing was raised")
    dist.barrier()


def test_join_ranks_that_disagree_raise_on_all(ranks: RankPool) -> None:
    ranks.run(2, _disagrees)


# --- amp ---


def _amp_step(ddp: Any, optimizer: Any, step: int, rank: int, overflow: bool = False) -> None:
    from apex import amp

    optimizer.zero_grad()
    loss = ddp(batch(rank, step)).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        (scaled * float("inf") if overflow else scaled).backward()
    optimizer.step()


def _joins_with_amp(rank: int, world: int, level: str, scale: Any) -> None:
    from apex import amp

    model = make(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=scale, verbosity=0
    )
    ddp = DistributedDataParallel(model)
    for epoch in range(2):
        with ddp.join():
            for step in range(3 * rank if epoch else 1 + 2 * rank):
                # With a dynamic scale, one step of a rank that trains longer is skipped.
                _amp_step(ddp, optimizer, step, rank, overflow=scale is None and step == 2)
        check_same_on_all_ranks(list(model.parameters()), "parameters after join()")
        states = [None] * world
        dist.all_gather_object(states, amp.state_dict())
        check(all(state == states[0] for state in states), f"scalers {states}")
        _amp_step(ddp, optimizer, 5, rank)
        check_same_on_all_ranks(list(model.parameters()), "parameters a step later")
        check_same_on_all_ranks(list(amp.master_params(optimizer)), "masters a step later")


@pytest.mark.parametrize("scale", [None, 64.0])
@pytest.mark.parametrize("level", ["O1", "O2", "O2-bf16"])
@pytest.mark.parametrize("world", [2, 3])
def test_join_with_amp_ranks_stay_alike(
    ranks: RankPool, world: int, level: str, scale: float | None
) -> None:
    if level == "O2-bf16" and scale is None:
        scale = 1.0
    ranks.run(world, _joins_with_amp, level, scale)


def _unknown_scaler(rank: int, world: int) -> None:
    from apex.amp.scaler import LossScaler

    ddp = DistributedDataParallel(make())
    scaler = LossScaler("dynamic")
    try:
        with ddp.join():
            scaler.synchronize()
    except RuntimeError as error:
        check("join(scalers=[...])" in str(error), str(error))
    else:
        check(False, "not refused")


def test_join_refuses_a_scaler_that_others_do_not_know(ranks: RankPool) -> None:
    ranks.run(2, _unknown_scaler)
