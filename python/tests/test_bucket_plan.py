# SPDX-License-Identifier: BSD-3-Clause
"""bucket_plan() and load_bucket_plan(): accepted and refused plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_support import (
    RankPool,
    check,
    check_equal,
    check_near,
    check_same_on_all_ranks,
    gradients,
    to_reference,
)
from torch import nn

from apex.parallel import DistributedDataParallel


def make() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(6, 32)]
    for _ in range(8):
        layers += [nn.Tanh(), nn.Linear(32, 32)]
    return nn.Sequential(*layers)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.sin(torch.arange(24, dtype=torch.float32).view(4, 6) + 10 * step + 3 * rank)


def check_step(ddp: Any, rank: int, world: int, step: int) -> None:
    reference = to_reference(ddp.module)
    for r in range(world):
        (reference(batch(r, step).double()).square().sum() / world).backward()
    expected = gradients(reference)
    ddp.zero_grad()
    ddp(batch(rank, step)).square().sum().backward()
    for name, grad in gradients(ddp).items():
        check_near(grad, expected[name], f"step {step}, {name}", 1e-4)
    check_same_on_all_ranks([p.grad for p in ddp.parameters() if p.requires_grad], f"step {step}")


def _loads(rank: int, world: int, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(make(), message_size=1, **options)
    check_equal(ddp.bucket_plan(), None, "before the first backward")
    check_step(ddp, rank, world, 0)
    names = [name for bucket in ddp.bucket_plan() for name in bucket]

    # Another run of the same model loads it. Rank 0's plan is used.
    again = DistributedDataParallel(make(), **options)
    plan = [names[:5], names[5:6], names[6:]]
    again.load_bucket_plan(plan if rank == 0 else [[name] for name in names])
    for step in range(6):
        check_step(again, rank, world, step)
        check_equal(again.bucket_plan(), plan, "plan that was loaded")
    check_equal(again.statistics()["plans_recorded"], 1, "plans recorded")
    # The plan does not match any more, so buckets are assigned by size.
    again.module[0].weight.requires_grad_(False)
    check_step(again, rank, world, 8)
    held = [name for bucket in again.bucket_plan() for name in bucket]
    check("0.weight" not in held and len(held) == len(names) - 1, f"{held}")


@pytest.mark.processes
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"]
)
def test_loaded_plan_gradients_stay_right(ranks: RankPool, options: dict[str, Any]) -> None:
    ranks.run(2, _loads, options)


def _refuses(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    for plan, text in (
        ([["nothing"]], "names 'nothing', which the module does not have"),
        ([["0.weight"], ["0.weight"]], "names parameter 0 twice"),
    ):
        error = None
        try:
            ddp.load_bucket_plan(plan)
        except ValueError as caught:
            error = caught
        check(error is not None and text in str(error), f"{text}: {error}")


@pytest.mark.processes
def test_plans_that_do_not_fit_are_refused(ranks: RankPool) -> None:
    ranks.run(1, _refuses)
