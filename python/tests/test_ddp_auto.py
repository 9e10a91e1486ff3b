"""message_size="auto": buckets that tune themselves."""

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

pytestmark = pytest.mark.processes


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(6, 32)]
    for _ in range(8):
        layers += [nn.Tanh(), nn.Linear(32, 32)]
    return nn.Sequential(*layers)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.sin(torch.arange(24, dtype=torch.float32).view(4, 6) + 10 * step + 3 * rank)


def backward(ddp: nn.Module, rank: int, step: int) -> None:
    ddp.zero_grad()
    ddp(batch(rank, step)).square().sum().backward()


def check_step(ddp: Any, rank: int, world: int, step: int) -> None:
    reference = to_reference(ddp.module)
    for r in range(world):
        (reference(batch(r, step).double()).square().sum() / world).backward()
    expected = gradients(reference)
    backward(ddp, rank, step)
    for name, grad in gradients(ddp).items():
        check_near(grad, expected[name], f"step {step}, {name}", 1e-4)
    check_same_on_all_ranks([p.grad for p in ddp.parameters()], f"step {step}")


def _tunes(rank: int, world: int, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(make(), message_size="auto", **options)
    check_equal(ddp.bucket_plan(), None, "before the first backward")
    for step in range(30):
        check_step(ddp, rank, world, step)
    check_equal(ddp.statistics()["plans_tuned"], 1, "decisions")
    check_equal(ddp.statistics()["plans_learnt"], 1, "plans learnt")
    plan = ddp.bucket_plan()
    names = sorted(name for bucket in plan for name in bucket)
    check_equal(
        names, sorted(n for n, _ in ddp.module.named_parameters()), "parameters in the plan"
    )
    text = repr(plan).encode()
    check_same_on_all_ranks([torch.tensor([len(text), *text])], "plan")

    # Another run of the same model begins with it.
    again = DistributedDataParallel(make(), message_size="auto", **options)
    again.load_bucket_plan(plan)
    for step in range(6):
        check_step(again, rank, world, step)
        check_equal(again.bucket_plan(), plan, "plan that was loaded")
    # Rank 0's counts.
    again.load_bucket_plan(plan if rank == 0 else [[name] for name in names])
    check_step(again, rank, world, 7)
    check_equal(again.bucket_plan(), plan, "rank 0's plan")
    # It does not fit any more: buckets are made from sizes, and tuned.
    again.module[0].weight.requires_grad_(False)
    check_step_frozen(again, rank, 8)
    held = [name for bucket in again.bucket_plan() for name in bucket]
    check("0.weight" not in held and len(held) == len(names) - 1, f"{held}")


def check_step_frozen(ddp: Any, rank: int, step: int) -> None:
    backward(ddp, rank, step)
    check_same_on_all_ranks([p.grad for p in ddp.parameters() if p.requires_grad], f"step {step}")


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"]
)
def test_auto_buckets_tune_once_and_gradients_stay_right(
    ranks: RankPool, options: dict[str, Any]
) -> None:
    ranks.run(2, _tunes, options)


def _refuses(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    for plan, text in (
        ([["nothing"]], "names 'nothing', which the module does not have"),
        ([["0.weight"], ["0.weight"]], "named twice"),
    ):
        error = None
        try:
            ddp.load_bucket_plan(plan)
        except ValueError as caught:
            error = caught
        check(error is not None and text in str(error), f"{text}: {error}")
    for options in (
        {"delay_allreduce": True},
        {"allreduce_trigger_params": list(ddp.parameters())[:1]},
    ):
        error = None
        try:
            DistributedDataParallel(ddp.module, message_size="auto", **options)
        except ValueError as caught:
            error = caught
        check(error is not None and "auto" in str(error), f"{options}: {error}")


def test_auto_buckets_contradictions_are_refused(ranks: RankPool) -> None:
    ranks.run(1, _refuses)
