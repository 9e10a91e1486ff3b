# SPDX-License-Identifier: BSD-3-Clause
"""Plans proposed from recorded times, and plans that are loaded."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
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
from apex.parallel.propose_plan import Cost, fit_cost, main, merge, propose_plan


def end_of(cuts: tuple[int, ...], ready: list[float], sizes: list[int], cost: Cost) -> float:
    """When the last bucket arrives, by the definition."""
    end, begin = 0.0, 0
    for cut in cuts:
        end = max(end, *ready[begin:cut]) + cost.of(sum(sizes[begin:cut]))
        begin = cut
    return end


def test_merge_is_as_good_as_every_way_to_cut() -> None:
    draw = random.Random(7)
    for _ in range(60):
        count = draw.randint(1, 8)
        ready = sorted(draw.uniform(0, 1) for _ in range(count))
        sizes = [draw.randint(0, 100) for _ in range(count)]
        cost = Cost(draw.choice([0.0, 0.01, 0.3]), draw.choice([0.0, 0.001, 0.02]))
        every = [
            (*cuts, count)
            for length in range(count)
            for cuts in itertools.combinations(range(1, count), length)
        ]
        best = min(end_of(cuts, ready, sizes, cost) for cuts in every)
        found = end_of(tuple(merge(ready, sizes, cost)), ready, sizes, cost)
        assert found == pytest.approx(best, abs=1e-12)


def report_of(
    ready: list[float], sizes: list[int], cost: Cost, clock: str = "host"
) -> dict[str, Any]:
    """What a network that costs exactly that would have been recorded with."""
    buckets, free = [], 0.0
    for index, (at, size) in enumerate(zip(ready, sizes, strict=True)):
        free = max(free, at) + cost.of(size)
        buckets.append(
            {
                "names": [f"p{index}"],
                "bytes": size,
                "ready_s": at,
                "launched_s": at,
                "arrived_s": free,
            }
        )
    return {"clock": clock, "buckets": [*buckets, {**buckets[-1], "names": [], "bytes": 8}]}


def test_fit_finds_the_cost_of_an_exact_network() -> None:
    cost = Cost(0.002, 1e-8)
    report = report_of([0.01 * i for i in range(8)], [1000 * (i % 5 + 1) for i in range(8)], cost)
    found = fit_cost(report["buckets"][:-1])
    assert found == pytest.approx(cost, rel=1e-6)
    # All of one size: latency and rate cannot be told apart.
    report = report_of([0.0, 0.1], [1000, 1000], cost)
    assert fit_cost(report["buckets"][:-1]).of(1000) == pytest.approx(cost.of(1000))


def test_large_latency_merges_and_none_does_not() -> None:
    ready = [0.001 * i for i in range(6)]
    sizes = [10_000, 20_000, 10_000, 30_000, 10_000, 20_000]
    assert len(propose_plan(report_of(ready, sizes, Cost(0.1, 1e-9)))) < 3
    plan = propose_plan(report_of(ready, sizes, Cost(0.0, 1e-9)))
    assert plan == [[f"p{i}"] for i in range(6)]


def test_reports_that_say_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="no buckets"):
        propose_plan({"clock": "host", "buckets": []})
    with pytest.raises(ValueError, match="host only"):
        propose_plan(report_of([0.0], [1], Cost(1.0, 0.0), clock="host only"))
    (tmp_path / "broken.json").write_text("{")
    for name, text in {
        "list": "[1]",
        "text": '"x"',
        "lacking": '{"buckets": [{"names": ["a"]}]}',
    }.items():
        (tmp_path / f"{name}.json").write_text(text)
    for name, said in {
        "missing": "cannot read",
        "broken": "broken.json: Expecting",
        "list": "list.json is not what overlap_report() returns.",
        "text": "text.json is not what overlap_report() returns.",
        "lacking": "lacking.json is not what overlap_report() returns.",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / f"{name}.json")])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


# --- with ranks ---


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


def _proposes_and_loads(rank: int, world: int, options: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(make(), message_size=1, **options)
    check_equal(ddp.bucket_plan(), None, "before the first backward")
    ddp.record_overlap()
    for step in range(5):
        check_step(ddp, rank, world, step)
    names = [name for bucket in ddp.bucket_plan() for name in bucket]
    plan = propose_plan(json.loads(json.dumps(dataclasses.asdict(ddp.overlap_report()))))
    check_equal([name for bucket in plan for name in bucket], names, "parameters of the proposal")

    # Another run of the same model uses it; rank 0's counts.
    again = DistributedDataParallel(make(), **options)
    plan = [names[:5], names[5:6], names[6:]]
    again.load_bucket_plan(plan if rank == 0 else [[name] for name in names])
    for step in range(6):
        check_step(again, rank, world, step)
        check_equal(again.bucket_plan(), plan, "plan that was loaded")
    check_equal(again.statistics()["plans_learnt"], 1, "plans recorded")
    # It does not fit any more: buckets are made from sizes.
    again.module[0].weight.requires_grad_(False)
    check_step(again, rank, world, 8)
    held = [name for bucket in again.bucket_plan() for name in bucket]
    check("0.weight" not in held and len(held) == len(names) - 1, f"{held}")


@pytest.mark.processes
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"]
)
def test_plan_proposed_and_loaded_gradients_stay_right(
    ranks: RankPool, options: dict[str, Any]
) -> None:
    ranks.run(2, _proposes_and_loads, options)


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
    error = None
    try:
        DistributedDataParallel(ddp.module, message_size="auto")
    except ValueError as caught:
        error = caught
    check(error is not None and "propose_plan" in str(error), f"{error}")


@pytest.mark.processes
def test_plans_that_do_not_fit_are_refused(ranks: RankPool) -> None:
    ranks.run(1, _refuses)
