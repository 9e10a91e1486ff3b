# SPDX-License-Identifier: BSD-3-Clause
"""Uneven inputs: join() with gradients, buffers, accumulation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ddp_steps_support import batch, make
from ddp_support import (
    RankPool,
    check,
    check_near,
    check_same_on_all_ranks,
    gradients,
    on_ranks,
    raises,
    to_reference,
)
from torch import nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def reference_step(
    reference: nn.Module, active: list[int], divide_by: int, steps: list[int], rate: float
) -> dict[str, Any]:
    """One synchronized step in float64 on the batches of the active ranks. Returns gradients by
    name."""
    reference.zero_grad()
    for rank in active:
        for step in steps:
            (reference(batch(rank, step).double()).square().sum() / divide_by).backward()
    result = gradients(reference)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= rate * parameter.grad
    return result


class Counter(nn.Module):
    """Its buffer counts the rank's data, and the loss depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x.sum()
        return x * self.scale + self.seen


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


# --- buffers ---


@on_ranks(2)
def test_join_buffers_are_those_of_a_rank_that_had_data_to_the_end(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(Counter(), broadcast_buffers=True)
    with ddp.join():
        for step in range([1, 3][rank]):
            ddp.zero_grad()
            ddp(batch(rank, step)).sum().backward()
    # Not broadcast in forward, where rank 0 takes no part: rank 1's own buffer, which it had alone.
    seen = batch(1, 0).sum() + batch(1, 1).sum() + batch(1, 2).sum()
    check_near(ddp.module.seen, seen, "buffer", 1e-4)


@on_ranks(2)
def test_join_no_sync_needs_nothing_from_the_others(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    reference = to_reference(ddp.module)
    with ddp.join():
        for step in range([1, 2][rank]):
            ddp.zero_grad()
            for _ in range(rank):  # only rank 1 accumulates
                with ddp.no_sync():
                    ddp(batch(rank, step)).square().sum().backward()
            ddp(batch(rank, step)).square().sum().backward()
        mine = gradients(ddp)
    if rank == 1:
        expected = reference_step(reference, [1], world, [1, 1], 0.0)
        for name, grad in mine.items():
            check_near(grad, expected[name], name, 1e-4)


@on_ranks(3)
def test_join_exception_in_backward_ends_all_ranks(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    steps = 0

    def hook(gradient: torch.Tensor) -> None:
        if rank == 1 and steps == 1:
            raise ArithmeticError("the script's own")

    next(ddp.parameters()).register_hook(hook)
    expected = ArithmeticError if rank == 1 else RuntimeError
    with raises(expected, "" if rank == 1 else "exception on rank 1"), ddp.join():
        for steps in range([1, 3, 3][rank]):
            ddp.zero_grad()
            torch.sin(ddp(batch(rank, steps))).sum().backward()


# --- the edges ---


@on_ranks(2)
def test_join_throw_on_early_termination_raises_on_all(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    try:
        with ddp.join(throw_on_early_termination=True):
            for step in itertools.count() if rank == 1 else range(1):
                ddp.zero_grad()
                ddp(batch(rank, step)).sum().backward()
    except RuntimeError as error:
        check("rank 0 has run out of data" in str(error), str(error))
    else:
        raise AssertionError("nothing was raised")


@on_ranks(2)
def test_join_disabled_and_nested(rank: int, world: int) -> None:
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
