# SPDX-License-Identifier: BSD-3-Clause
"""Random partitions of one batch over ranks and micro-batches, with random weights of the samples.

The reference is one process in float64: the gradient of the weighted mean over the whole batch.
"""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import torch
from ddp_support import check, check_same_on_all_ranks, host_channel
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

FEATURES, CLASSES = 5, 3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 8e-3}


class Branches(nn.Module):
    """Branches that a rank, or all ranks, may skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, use: list[int]) -> Tensor:
        x = torch.tanh(self.first(x.to(self.last.weight.dtype)))
        for index in use:
            x = x + torch.tanh(self.branches[index](x))
        return self.last(x)


def world_of(seed: int) -> int:
    return 1 + random.Random(f"world {seed}").randrange(4)


class Case:
    """The case of a seed, equal on every rank."""

    def __init__(self, seed: int, world: int) -> None:
        self.random = pick = random.Random(seed)
        self.dtype = pick.choice([torch.float64, torch.float64, *TOLERANCE])
        self.samples = pick.randint(1, 24)
        self.weights = self._weights(pick)
        self.steps = pick.randint(1, 3)
        self.options: dict[str, Any] = {
            "message_size": pick.choice([1, 60, 10_000]),
            "gradient_as_bucket_view": pick.random() < 0.4,
            "delay_allreduce": pick.random() < 0.2,
            "allreduce_always_fp32": pick.random() < 0.3,
            "check_finite": pick.random() < 0.2,
            "on_failure": pick.choice(["raise", "raise", "skip"]),
            "broadcast_buffers": pick.random() < 0.2,
        }
        self.hook = pick.choice([None, None, None, "fp16", "bf16"])
        if self.dtype == torch.float64:
            self.hook = None
        self.channel = pick.choice(["1", "1", "0"])
        self.scale = pick.choice([1.0, 1.0, 1024.0])
        if self.dtype == torch.float16 or self.hook == "fp16":  # a rank's own sums must fit
            self.weights, self.scale = [min(w, 5.0) for w in self.weights], 1.0
        self.uses_branches = pick.random() < 0.5
        self.joins = pick.random() < 0.15 and not self.options["check_finite"]
        self.owner = [pick.randrange(world) for _ in range(self.samples)]
        if pick.random() < 0.3:  # one rank has no samples
            empty = pick.randrange(world)
            self.owner = [rank if rank != empty else (rank + 1) % world for rank in self.owner]

    def _weights(self, pick: random.Random) -> list[float]:
        kind = pick.choice(["ones", "ones", "masks", "real", "large"])
        of_one = {
            "ones": lambda: 1.0,
            "masks": lambda: float(pick.randint(0, 5)),
            "real": lambda: pick.random(),
            "large": lambda: float(pick.randint(1000, 4000)),
        }[kind]
        return [of_one() for _ in range(self.samples)]


def _loss(output: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    each = nn.functional.cross_entropy(output.to(weights.dtype), y, reduction="none")
    return (each * weights).sum()


def _micro_batches(indices: list[int], pick: random.Random) -> list[list[int]]:
    count = pick.randint(1, 3)
    cuts = sorted(pick.randint(0, len(indices)) for _ in range(count - 1))
    return [indices[a:b] for a, b in zip([0, *cuts], [*cuts, len(indices)], strict=True)]


def _weight(value: float, pick: random.Random) -> Any:
    exact = value == int(value)
    kinds: list[Any] = [value, torch.tensor(value, dtype=torch.float64)]
    if exact:
        kinds += [int(value), torch.tensor(int(value)), torch.tensor([int(value)])]
    return pick.choice(kinds)


def _step(
    ddp: DistributedDataParallel, case: Case, step: int, rank: int, x: Tensor, y: Tensor
) -> list[list[int]]:
    """This rank's part of a step. Returns, by sample, the branches it used, for the reference."""
    mine = random.Random(f"{case.owner} {step} {rank}")  # different accumulation on every rank
    weights = torch.tensor(case.weights, dtype=torch.float64)
    batches = _micro_batches([i for i, owner in enumerate(case.owner) if owner == rank], mine)
    branches = branches_of(case, step)

    def forward(batch: list[int]) -> Tensor:
        # The samples of one branch set at a time, so that the reference can do the same.
        parts = [
            _loss(ddp(x[part], branches[part[0]] if part else []), y[part], weights[part])
            for part in [[i] for i in batch] or [[]]
        ]
        return torch.stack(parts).sum() * case.scale

    ahead = [forward(batch) for batch in batches] if mine.random() < 0.3 else None
    for number, batch in enumerate(batches):
        last = number + 1 == len(batches)
        total = sum(case.weights[i] for i in batch)
        loss = forward(batch) if ahead is None and mine.random() < 0.5 else None
        with contextlib.nullcontext() if last else ddp.no_sync():
            with ddp.weight(_weight(total, mine)):
                if ahead is not None:
                    loss = ahead[number]
                elif loss is None:
                    loss = forward(batch)
                if mine.random() < 0.2:  # two half-weighted backwards of the same samples
                    with ddp.no_sync():
                        (loss / 2).backward(retain_graph=True)
                    loss = loss / 2
                loss.backward()
    return branches


def branches_of(case: Case, step: int) -> list[list[int]]:
    pick = random.Random(f"{case.owner} {step}")
    if not case.uses_branches:
        return [[0, 1, 2]] * case.samples
    return [pick.choice([[0], [1], [0, 1], []]) for _ in range(case.samples)]


def _reference(model: nn.Module, case: Case, step: int, x: Tensor, y: Tensor) -> list[Any]:
    """Gradients of the mean over the batch in float64; None if no sample used a parameter."""
    model = copy.deepcopy(model).double()
    for parameter in model.parameters():
        parameter.grad = None
    weights = torch.tensor(case.weights, dtype=torch.float64)
    branches = branches_of(case, step)
    parts = [_loss(model(x[[i]], branches[i]), y[[i]], weights[[i]]) for i in range(case.samples)]
    total = weights.sum().item()
    mean = torch.stack(parts).sum() * case.scale / (total if total > 0 else 1.0)
    (mean if total > 0 else mean * 0).backward()
    return [parameter.grad for parameter in model.parameters()]


def _gap(ddp: DistributedDataParallel, expected: list[Any]) -> float:
    """The largest difference, relative to the largest gradient."""
    largest = max((e.abs().max().item() for e in expected if e is not None), default=0.0)
    gaps = [0.0]
    for parameter, e in zip(ddp.module.parameters(), expected, strict=True):
        grad = parameter.grad
        if e is None:  # a rank without samples also runs forward, and may use no branch
            check(grad is None or not grad.any(), "a gradient of what no sample used")
        else:
            check(grad is not None, "no gradient of what a sample used")
            gaps.append((grad.double() - e).abs().max().item())
    return max(gaps) / (largest or 1.0)


def run_seed(rank: int, world: int, seed: int) -> None:
    case = Case(seed, world)
    torch.manual_seed(seed)
    model = Branches().to(case.dtype)
    x = torch.randn(case.samples, FEATURES, dtype=torch.float64)
    y = torch.randint(CLASSES, (case.samples,))
    torch.manual_seed(1000 * seed + rank)
    what = f"seed {seed}, rank {rank} of {world}, {case.dtype}, {case.options}, {case.hook}"
    with host_channel(case.channel):
        ddp = DistributedDataParallel(model, gradient_average="weighted", **case.options)
    if case.hook is not None:
        ddp.register_builtin_comm_hook(case.hook)
    tolerance = TOLERANCE[case.dtype]
    if case.hook is not None:
        tolerance = max(tolerance, TOLERANCE[torch.bfloat16 if "bf" in case.hook else torch.half])
    for step in range(case.steps):
        ddp.zero_grad()
        _step(ddp, case, step, rank, x, y)
        expected = _reference(model, case, step, x, y)
        gap = _gap(ddp, expected)
        check(gap <= tolerance, f"{what}: step {step} is {gap:.3g} off")
        check_same_on_all_ranks([p.grad for p in ddp.module.parameters()], what)
        total = sum(case.weights)
        check(abs(ddp.total_weight - total) <= 1e-12 * total, f"{what}: {ddp.total_weight}")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 / case.scale * parameter.grad
    if case.joins:
        _join(ddp, case, rank, x, y, what, tolerance)


def _join(
    ddp: DistributedDataParallel,
    case: Case,
    rank: int,
    x: Tensor,
    y: Tensor,
    what: str,
    tolerance: float,
) -> None:
    """Each rank has one step more than the previous one. Ranks that have finished have weight 0."""
    weights = torch.tensor(case.weights, dtype=torch.float64)
    size = 1 + case.samples // 2
    world = int(ddp.world_size)
    of_rank = weights[:size].sum().item()
    # Ranks with data have the same samples, so the mean is that of one of them.
    alike = copy.copy(case)
    alike.scale, alike.uses_branches = 1.0, False
    alike.samples, alike.weights = size, case.weights[:size]
    expected = _reference(ddp.module, alike, 0, x, y)
    found = []
    with ddp.join():
        for _ in range(rank + 1):
            ddp.zero_grad()
            with ddp.weight(of_rank):
                _loss(ddp(x[:size], [0, 1, 2]), y[:size], weights[:size]).backward()
            found.append((ddp.total_weight, _gap(ddp, expected)))
    for step, (total, gap) in enumerate(found):
        check(abs(total - of_rank * (world - step)) <= 1e-9 * total, f"{what}: {total} in {step}")
        check(gap <= tolerance, f"{what}: step {step} is {gap:.3g} off under join()")


def run_seeds(rank: int, world: int, seeds: list[int]) -> None:
    for seed in seeds:
        run_seed(rank, world, seed)


def plain_average_is_off(rank: int, world: int) -> None:
    """The negative control: averages over ranks differ from the mean, and the check detects it."""
    case = Case(1, world)
    case.dtype, case.weights, case.samples = torch.float64, [1.0] * 7, 7
    case.owner, case.uses_branches, case.scale = [0, 0, 0, 0, 0, 0, 1], False, 1.0
    torch.manual_seed(0)
    model = Branches().double()
    x = torch.randn(7, FEATURES, dtype=torch.float64)
    y = torch.randint(CLASSES, (7,))
    ddp = DistributedDataParallel(model)
    own = [i for i, owner in enumerate(case.owner) if owner == rank]
    nn.functional.cross_entropy(ddp(x[own], [0, 1, 2]), y[own]).backward()
    gap = _gap(ddp, _reference(model, case, 0, x, y))
    check(gap > 0.05, f"plain averaging is only {gap} off")
