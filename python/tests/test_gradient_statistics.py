# SPDX-License-Identifier: BSD-3-Clause
"""gradient_statistics=True, and clip_grad_norm_().

More cases: ``python python/tests/test_gradient_statistics.py --cases 1000``.
"""

from __future__ import annotations

import argparse
import math
import pickle
import sys
from typing import Any

import pytest
import torch
from ddp_support import DEVICE, RankPool, check, check_equal, raises
from gradient_statistics_cases import near, run_seeds, total
from torch import nn

from apex.parallel import DistributedDataParallel, OverlappedOptimizer

pytestmark = pytest.mark.processes

CASES = 120


def _run(pool: RankPool, first: int, count: int) -> None:
    for world in range(1, 5):
        seeds = [seed for seed in range(first, first + count) if 1 + seed % 4 == world]
        for begin in range(0, len(seeds), 25):
            pool.run(world, run_seeds, seeds[begin : begin + 25], timeout_s=240)


@pytest.mark.parametrize("part", range(2))
def test_gradient_statistics_random_steps_agree_with_float64(ranks: RankPool, part: int) -> None:
    _run(ranks, part * CASES // 2, CASES // 2)


def _ddp(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return DistributedDataParallel(net, **{"gradient_statistics": True, **options})


def _outlier(rank: int, world: int) -> None:
    ddp = _ddp()
    torch.manual_seed(10 + rank)
    for step in range(60):
        ddp.zero_grad()
        loss = ddp(torch.randn(16, 4)).square().mean()
        # If all ranks change, none is an outlier. If one does, it is, even among two.
        (loss * (1000 if step == 30 else 1) * (300 if step == 50 and rank == 1 else 1)).backward()
        found = ddp.gradient_statistics()
        check_equal(found.outliers, [1] if step == 50 else [], f"outliers in step {step}")
        check_equal(len(found.z_scores), world, "z scores")
        if step == 50:
            check(found.z_scores[1] > 10 and abs(found.z_scores[0]) < 10, "z scores")
            check("<- outlier" in str(found), str(found))
            check_equal(pickle.loads(pickle.dumps(found)), found, "pickled")
    with torch.no_grad():  # a flipped bit in an exponent
        hook = ddp.module[0].weight.register_hook(
            lambda grad: grad.clone().fill_(1e30) if rank == 0 else grad
        )
    ddp.zero_grad()
    ddp(torch.randn(16, 4)).square().mean().backward()
    hook.remove()
    check_equal(ddp.gradient_statistics().outliers, [0], "outliers")
    ddp.zero_grad()
    (ddp(torch.randn(16, 4)).square().mean() * (math.inf if rank == 1 else 1)).backward()
    check_equal(ddp.gradient_statistics().outliers, [1], "infinite")


@pytest.mark.parametrize("world", [2, 3])
def test_gradient_statistics_name_the_rank_that_is_an_outlier(ranks: RankPool, world: int) -> None:
    ranks.run(world, _outlier)


def _noise_scale(rank: int, world: int) -> None:
    """Gradients g + e with normal e, for which tr(S) and |G|^2 are known."""
    width = 400
    net = nn.Linear(width, 1, bias=False)
    ddp = DistributedDataParallel(net, gradient_statistics=True)
    torch.manual_seed(rank)
    true = torch.full((1, width), 0.5)
    for _ in range(300):
        ddp.zero_grad()
        ddp((true + torch.randn(1, width) * 2).mul(1)).sum().backward()
    found = ddp.gradient_statistics()
    expected = 4 * width / (0.25 * width)
    check(abs(found.noise_scale / expected - 1) < 0.25, f"{found.noise_scale} for {expected}")


def test_gradient_statistics_noise_scale_of_known_noise(ranks: RankPool) -> None:
    ranks.run(3, _noise_scale)


def _options(rank: int, world: int) -> None:
    without = _ddp(gradient_statistics=False)
    for call in (without.gradient_statistics, without.parameter_norms):
        with raises(RuntimeError, "gradient_statistics=True"):
            call()
    without(torch.ones(1, 4)).sum().backward()
    expected = total([p.grad for p in without.parameters()])
    near(float(without.clip_grad_norm_(1e-3)), expected, 1e-5, "norm without the option")
    near(total([p.grad for p in without.parameters()]), 1e-3, 1e-3, "clipped")
    with raises(TypeError, "gradient_statistics must be True or False"):
        _ddp(gradient_statistics="yes")
    with raises(RuntimeError, "gradient_statistics"):
        _ddp(gradient_statistics=rank == 0)
    ddp = _ddp()
    ddp.skip_step().backward()
    found = ddp.gradient_statistics()
    check(math.isnan(found.norm), "norm of a step that was skipped")
    check_equal(float(ddp.clip_grad_norm_(1.0)), 0.0, "clipped without gradients")
    ddp(torch.full((1, 4), math.nan)).sum().backward()
    with raises(RuntimeError, "non-finite"):
        ddp.clip_grad_norm_(1.0, error_if_nonfinite=True)
    ddp.zero_grad()
    overlapped = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp)
    for step in range(6):
        ddp(torch.ones(1, 4)).sum().backward()
        overlapped.step()
        check_equal(ddp.gradient_statistics().backward, step + 3, "with an OverlappedOptimizer")
    with ddp.join():
        for step in range(2 + rank):
            ddp.zero_grad()
            ddp(torch.ones(1, 4)).sum().backward()
            found = ddp.gradient_statistics()
            check_equal([math.isnan(n) for n in found.rank_norms], [step == 2, False], "join")


def test_gradient_statistics_with_other_options(ranks: RankPool) -> None:
    ranks.run(2, _options)


def _clip_after_unscaling(rank: int, world: int) -> None:
    """Hazard: changes without a version change, by GradScaler's kernel or .data."""
    ddp = _ddp(gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(ddp(torch.randn(3, 4)).square().mean()).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        else:
            for parameter in ddp.parameters():
                parameter.grad.data.div_(1024)
        expected = total([p.grad for p in ddp.parameters()])
        near(float(ddp.clip_grad_norm_(1e-3)), expected, 1e-5, f"norm in step {step}")
        near(total([p.grad for p in ddp.parameters()]), 1e-3, 1e-2, f"clipped in step {step}")
        near(float(ddp.clip_grad_norm_(1e-3)), 1e-3, 1e-2, "clipped again")
        if step % 2:
            scaler.update(1024.0)


def test_gradient_statistics_clip_after_unscaling(ranks: RankPool) -> None:
    ranks.run(2, _clip_after_unscaling)


def _clip_other_gradients(rank: int, world: int) -> None:
    """Removed gradients, gradients of a parameter that replaces another, and float64."""
    for change in ("none", "replaced", "float64"):
        ddp = _ddp()
        if change == "float64":
            ddp.double()
        for scale in (1.0, 1e3 if change != "float64" else 1e60):
            ddp.zero_grad()
            x = torch.ones(2, 4, dtype=ddp.module[0].weight.dtype)
            (ddp(x).sum() * scale).backward()
        if change == "none":
            ddp.module[0].weight.grad = None
        elif change == "replaced":
            ddp.module[0].bias = nn.Parameter(torch.zeros(8))
            ddp.module[0].bias.grad = torch.full((8,), 1e5)
        expected = total([p.grad for p in ddp.parameters()])
        found = ddp.clip_grad_norm_(1.0)
        near(float(found), expected, 1e-5, change)
        check_equal(found.dtype, ddp.module[0].weight.dtype, "dtype")
        near(total([p.grad for p in ddp.parameters()]), 1.0, 1e-4, f"clipped, {change}")


def test_gradient_statistics_clip_other_gradients(ranks: RankPool) -> None:
    ranks.run(2, _clip_other_gradients)


class _Parts(nn.Module):
    """The gradient of each parameter is an argument; None: it is not used."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(size) for size in sizes)

    def forward(self, grads: list[torch.Tensor | None]) -> torch.Tensor:
        used = zip(self.parts, grads, strict=True)
        return torch.stack([(part * grad).sum() for part, grad in used if grad is not None]).sum()


def _large_in_place(rank: int, world: int) -> None:
    """Hazards: measured in the sum of shares, and lost when the plan is extended; or counted of a
    rank that does not use the parameter, as no other gradient is. Reference: float64, by rank."""
    sizes = (5, 100_001, 7)
    for case in ("used for the first time", "unused on rank 1"):
        ddp = DistributedDataParallel(
            _Parts(*sizes), gradient_statistics=True, bucket_cap_mb=0.01, init_sync=False
        )
        for step in range(4):
            grads: list[list[Any]] = []
            for r in range(world):
                seed = torch.Generator().manual_seed(10 * step + r)
                grads.append([torch.randn(size, generator=seed) for size in sizes])
                if case == "used for the first time" and step < 2:
                    grads[r][2] = None
                if case == "unused on rank 1" and step == 3 and r == 1:
                    grads[r][1] = None  # its gradient of the step before is still there
            if step < 3 or case == "used for the first time":
                ddp.zero_grad()
            before = [0.0 if p.grad is None else p.grad.clone() for p in ddp.module.parts]
            ddp(grads[rank]).backward()
            found = ddp.gradient_statistics()
            assert found is not None
            for r in range(world):
                late = 2 if case == "used for the first time" and step == 2 else None
                given = [
                    old + grad
                    for i, (old, grad) in enumerate(zip(before, grads[r], strict=True))
                    if grad is not None and i != late
                ]
                what = f"{case}, step {step}, rank {r}"
                near(found.rank_norms[r], total(given), 1e-4, what)


def test_gradient_statistics_of_large_gradients_in_place(ranks: RankPool) -> None:
    ranks.run(2, _large_in_place)
    ranks.run(3, _large_in_place)


def _too_large(rank: int, world: int) -> None:
    """Hazard: a norm that is finite in float64 only. Reference: torch's function."""
    ddp = DistributedDataParallel(_Parts(64), gradient_statistics=True)
    ddp([torch.full((64,), 1e38)]).backward()
    with raises(RuntimeError, "non-finite"):
        ddp.clip_grad_norm_(1.0, error_if_nonfinite=True)
    (part,) = ddp.module.parts
    check_equal(part.grad, torch.full((64,), 1e38), "the gradient")


def test_gradient_statistics_clip_of_a_norm_above_float32_raises(ranks: RankPool) -> None:
    ranks.run(2, _too_large)


def _no_passes(rank: int, world: int) -> None:
    """Where gradients are copied, they are not read again: no torch operator is called."""
    counts = {}
    for on in (False, True):
        ddp = _ddp(gradient_statistics=on)
        for _ in range(3):
            ddp.zero_grad()
            loss = ddp(torch.ones(1, 4)).sum()
            with torch.profiler.profile() as profile:
                loss.backward()
        counts[on] = {
            event.key: event.count
            for event in profile.key_averages()
            if event.key.startswith("aten::")
        }
    check_equal(counts[True], counts[False], "operators")


@pytest.mark.skipif(DEVICE != "cpu", reason="on a device, norms are operators")
def test_gradient_statistics_make_no_pass_and_no_collective(ranks: RankPool) -> None:
    ranks.run(2, _no_passes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    args = parser.parse_args()
    with RankPool() as pool:
        _run(pool, args.first, args.cases)
    print(f"{args.cases} cases from {args.first} on: all agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
