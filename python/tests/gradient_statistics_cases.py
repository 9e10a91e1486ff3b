# SPDX-License-Identifier: BSD-3-Clause
"""Random steps with gradient_statistics=True.

The references: each rank's gradient as a copy of the module computes it alone in the same dtype,
the averaged gradient in ``.grad``, and torch's function for clipping. All are computed in float64,
and results must be bitwise equal on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
from typing import Any

import torch
import torch.distributed as dist
from ddp_support import DEVICE, check, check_equal, host_channel
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel, GradientStatistics

DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)
#: Blocks of 512 squares are summed in float32. Each rank's own gradients are computed twice.
TOLERANCE = 1e-6
OWN_TOLERANCE = {
    torch.float64: TOLERANCE,  # one parameter is complex64
    torch.float32: 1e-4,
    torch.bfloat16: 3e-2,
    torch.float16: 1e-2,
}


class Net(nn.Module):
    def __init__(self, pick: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        wide = dtype in (torch.float32, torch.float64)  # torch cannot add sparse tensors of 16 bits
        width = pick.choice([3, 17, 40, 90])  # above 16 KiB, ranks sum shares
        self.first = nn.Linear(6, width)
        self.table = nn.Embedding(7, width, sparse=wide and pick.random() < 0.2)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.last = nn.Linear(width, 2)
        self.complex = nn.Parameter(torch.ones(3, dtype=torch.complex64) * 0.5)

    def forward(self, x: Tensor, use: list[int], scale: float) -> Tensor:
        dtype = self.first.weight.dtype
        y = torch.tanh(self.first(x.to(dtype))) + self.table(x[:, 0].abs().long() % 7)
        for index in use:
            y = y + torch.tanh(self.branches[index](y))
        extra = torch.view_as_real(self.complex).to(dtype).sum() if 0 in use else 0.0
        return self.last(y).sum() * scale + extra


class Case:
    def __init__(self, seed: int) -> None:
        self.pick = pick = random.Random(seed)
        self.dtype = pick.choice(DTYPES)
        self.options: dict[str, Any] = {
            "message_size": pick.choice([1, 60, 10_000]),
            "gradient_as_bucket_view": pick.random() < 0.4,
            "delay_allreduce": pick.random() < 0.2,
            "allreduce_always_fp32": pick.random() < 0.3,
            "gradient_average": pick.choice([True, True, False, "weighted"]),
            "check_finite": pick.random() < 0.2,
        }
        if self.options["gradient_average"] is True:
            self.options["gradient_predivide_factor"] = pick.choice([1.0, 1.0, 2.0])
        self.channel = pick.choice(["1", "1", "0"])
        self.keeps_gradients = self.options["gradient_average"] is True and pick.random() < 0.3
        self.micro_batches = pick.randint(1, 3)
        self.steps = pick.randint(2, 4)


def total(tensors: list[Tensor | None]) -> float:
    squares = 0.0
    for tensor in tensors:
        if tensor is None:
            continue
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        if values.is_complex():
            values = torch.view_as_real(values)
        squares += float(values.detach().double().square().sum())
    return math.sqrt(squares)


def near(actual: float, expected: float, tolerance: float, what: str) -> None:
    if math.isnan(expected) and math.isnan(actual):
        return
    check(
        math.isclose(actual, expected, rel_tol=tolerance, abs_tol=1e-12),
        f"{what}: {actual!r}, expected {expected!r}",
    )


def expected_noise(norms: list[float], samples: list[float], mean: float) -> tuple[float, float]:
    """(tr(S), |G|^2), by solving their two equations. One rank counts as its number of samples."""
    there = [(n, s) for n, s in zip(norms, samples, strict=True) if s > 0]
    if len(there) < 2:
        return math.nan, math.nan
    all_samples = sum(s for _, s in there)
    small = sum(s / all_samples * n * n for n, s in there)
    small_inverse, big_inverse = len(there) / all_samples, 1 / all_samples
    noise = (small - mean * mean) / (small_inverse - big_inverse)
    return noise, mean * mean - noise * big_inverse


def run_seeds(rank: int, world: int, seeds: list[int]) -> None:
    for seed in seeds:
        try:
            _run(rank, world, Case(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}, {world} ranks: {error}") from error


def _run(rank: int, world: int, case: Case) -> None:
    pick = case.pick
    torch.manual_seed(1000 + rank)  # the wrapper broadcasts rank 0's
    net = Net(pick, case.dtype).to(case.dtype)
    net.complex.data = torch.ones(3, dtype=torch.complex64) * 0.5
    weighted = case.options["gradient_average"] == "weighted"
    with host_channel(case.channel):
        ddp = DistributedDataParallel(net, gradient_statistics=True, **case.options)
    check(ddp.gradient_statistics() is None, "statistics before the first backward")
    signal = noise = 0.0
    estimates = 0
    seen: set[int] = set()
    for step in range(case.steps):
        ddp.zero_grad(set_to_none=not case.keeps_gradients)
        alone = copy.deepcopy(net)
        alone.zero_grad()
        weight = 0.0
        uses = [[i for i in range(3) if pick.random() < 0.6] for _ in range(world)]
        scale = pick.choice([1.0, 0.01, 30.0])
        sizes = [[pick.randint(1, 4) for _ in range(case.micro_batches)] for _ in range(world)]
        for part in range(case.micro_batches):
            x = torch.randn(sizes[rank][part], 6)
            weight += sizes[rank][part]
            alone(x, uses[rank], scale).backward()
            last = part + 1 == case.micro_batches
            with (
                contextlib.nullcontext() if last else ddp.no_sync(),
                ddp.weight(sizes[rank][part]) if weighted else contextlib.nullcontext(),
            ):
                ddp(x, uses[rank], scale).backward()
        found = ddp.gradient_statistics()
        assert found is not None
        check_equal(found.backward, step + 1, "number of the backward")
        own = total([p.grad for p in alone.parameters()])
        near(found.norm, total([p.grad for p in net.parameters()]), TOLERANCE, "norm")
        everything: list[Any] = [None] * world
        dist.all_gather_object(everything, (own, weight, found))
        used = {i for one in uses for i in one}
        # Gradients of parameters that are used for the first time are reduced outside of the plan.
        apart = step > 0 and not used <= seen
        seen |= used
        for other, (norm, samples, theirs) in enumerate(everything):
            expected = norm / samples if weighted else norm
            if not apart:
                tolerance = OWN_TOLERANCE[case.dtype]
                near(found.rank_norms[other], expected, tolerance, f"norm of rank {other}")
            check(
                repr(theirs) == repr(found),
                f"rank {other} has other statistics: {theirs!r} here {found!r}",
            )
        for one, (name, p) in zip(ddp.parameter_norms(), net.named_parameters(), strict=True):
            check_equal(one.name, name, "name")
            near(one.norm, total([p.grad]), TOLERANCE, f"norm of {name}")
        _check_noise(found, [w if weighted else 1.0 for _, w, _ in everything], world, case)
        if not math.isnan(found.noise):
            share = 1.0 if estimates == 0 else 0.05
            noise += share * (found.noise - noise)
            signal += share * (found.signal - signal)
            estimates += 1
        scale_now = noise / signal if estimates and signal > 0 else math.nan
        near(found.noise_scale, scale_now, 1e-9, "noise scale")
        _check_clipping(ddp, net, pick)


def _check_noise(found: GradientStatistics, samples: list[float], world: int, case: Case) -> None:
    mean = found.norm if case.options["gradient_average"] else found.norm / world
    noise, signal = expected_noise(found.rank_norms, samples, mean)
    near(found.noise, noise, 1e-7 if abs(noise) > 1e-9 else 1, "noise")
    near(found.signal, signal, 1e-6 if abs(signal) > 1e-9 else 1, "signal")


def _check_clipping(ddp: DistributedDataParallel, net: nn.Module, pick: random.Random) -> None:
    """Check against torch's function, which multiplies by max_norm / (norm + 1e-6)."""
    if any(p.grad is not None and p.grad.is_sparse for p in net.parameters()):
        return
    if pick.random() < 0.3:  # as a script that changes gradients after backward
        with torch.no_grad():
            net.first.weight.grad.mul_(3)
    limit = pick.choice([1e-3, 1e3])
    expected = total([q.grad for q in net.parameters()])
    factor = min(1.0, limit / (expected + 1e-6))
    before = [None if q.grad is None else q.grad.detach().clone() for q in net.parameters()]
    clipped = [None if old is None else (old * factor).to(old.dtype) for old in before]
    if DEVICE != "cpu":  # the factor is a tensor of 16 bits, as torch's
        copies = [None if old is None else old.clone().requires_grad_() for old in before]
        for one, old in zip(copies, before, strict=True):
            if one is not None:
                one.grad = old.clone()
        torch.nn.utils.clip_grad_norm_([one for one in copies if one is not None], limit)
        clipped = [None if one is None else one.grad for one in copies]
    norm = ddp.clip_grad_norm_(limit)
    low = any(q.dtype in (torch.float16, torch.bfloat16) for q in net.parameters())
    near(float(norm), expected, 2e-2 if low else 1e-4, "what clip_grad_norm_ returns")
    for q, wanted in zip(net.parameters(), clipped, strict=True):
        if wanted is not None:
            torch.testing.assert_close(q.grad, wanted, rtol=3e-2 if low else 1e-4, atol=1e-6)
