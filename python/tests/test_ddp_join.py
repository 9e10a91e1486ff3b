# SPDX-License-Identifier: BSD-3-Clause
"""Uneven inputs: join() with gradients, buffers, accumulation."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ddp_models import batch, build, data, make
from ddp_support import (
    check_near,
    check_same_on_all_ranks,
    check_step,
    gradients,
    host_channel,
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


@pytest.mark.parametrize("initial", [True, False], ids=["by_world", "by_active"])
@on_ranks(3)
def test_join_uneven_counts_equal_one_process(rank: int, world: int, initial: bool) -> None:
    """Other counts and options: ddp_programs.py."""
    ddp = DistributedDataParallel(make())
    reference = to_reference(ddp.module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    counts, mine = [2, 5, 3], []
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
    for parameter, wanted in zip(ddp.parameters(), reference.parameters(), strict=True):
        check_near(parameter, wanted, "final parameter", 1e-4)
    check_same_on_all_ranks([p.data for p in ddp.parameters()], "final parameters")
    # Afterwards it is an ordinary wrapper again.
    ddp.zero_grad()
    ddp(batch(rank, 0)).square().sum().backward()
    check_same_on_all_ranks([p.grad for p in ddp.parameters()], "after join()")


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


CHANGES = {
    "freezes": lambda ddp: ddp.module.layers[1].requires_grad_(False),
    "rebuilds": lambda ddp: ddp.rebuild_buckets(),
    "alternates": lambda ddp: ddp.module.layers[1].requires_grad_(
        not ddp.module.layers[1].weight.requires_grad
    ),
}


@pytest.mark.parametrize("channel", ["1", "0"], ids=["shared_memory", "sockets"])
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(3)
def test_plans_that_change_under_join_when_a_rank_has_no_data(
    rank: int, world: int, channel: str, change: str
) -> None:
    """Ranks with data change the plan when rank 0 has none."""
    torch.manual_seed(rank)
    with host_channel(channel):
        ddp = DistributedDataParallel(build(), message_size=20)

    def loss(model: nn.Module, r: int, step: int) -> torch.Tensor:
        return model(data(r, step), [0, 1, 2]).square().mean()

    for step in range(2):
        check_step(ddp, lambda m, r, s=step: loss(m, r, s), f"before, {step}")
    with ddp.join():
        for step in range(2 if rank == 0 else 7):
            if step == 4 or (step > 4 and change == "alternates"):
                CHANGES[change](ddp)
            ddp.zero_grad()
            loss(ddp, rank, 10 + step).backward()
            reference = to_reference(ddp.module)
            for r in range(0 if step < 2 else 1, world):
                x = data(r, 10 + step).double()
                (reference(x, [0, 1, 2]).square().mean() / world).backward()
            expected = gradients(reference)
            for name, grad in gradients(ddp.module).items():
                check_near(grad, expected[name], f"step {step}: {name}")
    ddp.module.requires_grad_(True)
    for step in (30, 31):
        check_step(ddp, lambda m, r, s=step: loss(m, r, s), f"after, {step}")


@on_ranks(2)
def test_join_throw_on_early_termination_raises_on_all(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    said = "rank 0 has run out of data"
    with raises(RuntimeError, said), ddp.join(throw_on_early_termination=True):
        for step in itertools.count() if rank == 1 else range(1):
            ddp.zero_grad()
            ddp(batch(rank, step)).sum().backward()


@on_ranks(2)
def test_join_disabled_and_nested(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    with ddp.join(enable=False):
        ddp(batch(rank, 0)).sum().backward()
    check_same_on_all_ranks([p.grad for p in ddp.parameters()], "gradients")
    nested = "join() was entered inside another join()"
    with ddp.join(), raises(RuntimeError, nested), ddp.join():
        pass
