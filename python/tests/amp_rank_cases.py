# SPDX-License-Identifier: BSD-3-Clause
"""Random training with apex.amp over several ranks, each with its own seed.

A case consists of a level, an optimizer, a wrapper, optional SyncBatchNorm, an optional averaged
copy, and a state that is loaded before or after wrapping. After every step, parameters, master
weights and the averaged copy must be bitwise equal on all ranks, and each master weight must round
to its parameter. Over all steps, the loss must fall.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ddp_support import check, check_same_on_all_ranks, forget_amp
from torch import nn

from apex import amp
from apex.optimizers import FusedAdam, FusedSGD
from apex.parallel import DistributedDataParallel, convert_syncbn_model
from apex.parallel.LARC import LARC

LEVELS = ("O0", "O1", "O2", "O3", "O1-bf16", "O2-bf16", "O3-bf16")
STEPS = 5
CASES_AT_ONCE = 10

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "fused_sgd": lambda params: FusedSGD(params, lr=0.05, momentum=0.5),
    "fused_adam": lambda params: FusedAdam(params, lr=0.01),
    "larc": lambda params: LARC(torch.optim.SGD(params, lr=0.05), trust_coefficient=1.0),
}


@dataclass
class AmpCase:
    seed: int
    level: str
    optimizer: str
    wrapper: str
    syncbn: bool
    averaged: bool
    restored: str  # "", "before" or "after" wrapping
    optimizer_state: bool  # whether it is restored too
    alone: bool  # with restored="before", on rank 0 only
    accumulate: bool


def draw_case(seed: int) -> AmpCase:
    rng = random.Random(seed)
    level = rng.choice(LEVELS)
    # torch's Adam: its eps is zero in float16, and its state has too few digits in bfloat16.
    optimizers = [each for each in OPTIMIZERS if "O3" not in level or each != "adam"]
    return AmpCase(
        seed,
        level,
        rng.choice(optimizers),
        rng.choice(["apex", "torch"]),
        rng.random() < 0.4,
        rng.random() < 0.4,
        rng.choice(["", "before", "after"]),
        rng.random() < 0.5,
        rng.random() < 0.3,
        rng.random() < 0.3,
    )


def build(case: AmpCase, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    first = nn.Linear(6, 12, bias=not case.syncbn)  # batch norm would make a bias's gradient zero
    layers = [first, nn.Tanh(), nn.Linear(12, 3)]
    if case.syncbn:
        layers.insert(1, nn.BatchNorm1d(12))
    return convert_syncbn_model(nn.Sequential(*layers))


def step(case: AmpCase, model: nn.Module, optimizer: Any, rank: int) -> float:
    generator = torch.Generator().manual_seed(case.seed * 10 + rank)
    x = torch.randn(16, 6, generator=generator)
    y = torch.stack([x.sum(1), x[:, 0] * 0.5, -x[:, 1]], 1) * 0.3
    parts = [slice(0, 8), slice(8, 16)] if case.accumulate else [slice(0, 16)]
    optimizer.zero_grad()
    total = 0.0
    for part in parts:
        loss = nn.functional.mse_loss(model(x[part]).float(), y[part]) / len(parts)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        total += loss.item()
    optimizer.step()
    mean = torch.tensor(total)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def saved(case: AmpCase, seed: int, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state after a short run at the same level in one process, without averaging."""
    model = build(case, seed)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def run_case(case: AmpCase, rank: int, world: int) -> None:
    # After a run, the state is the same on all ranks. Before wrapping, each rank may differ.
    before = case.restored == "before"
    state, optimizer_state = saved(case, case.seed * 100 + (rank if before else 0), 0)
    model = build(case, case.seed * 100 + 50 + rank)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=case.level, verbosity=0, max_loss_scale=2.0**8
    )
    if before and not (case.alone and rank > 0):
        model.load_state_dict(state)
    if case.wrapper == "apex":
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        wrapped = nn.parallel.DistributedDataParallel(model)
    if case.restored == "after":
        model.load_state_dict(state)
        if case.optimizer_state:
            optimizer.load_state_dict(optimizer_state)
    average = copy.deepcopy(model) if case.averaged else None
    check_same_on_all_ranks(list(model.parameters()), "before the first step")
    first = [p.detach().clone() for p in model.parameters()]
    curve = []
    for s in range(STEPS):
        curve.append(step(case, wrapped, optimizer, rank))
        parameters, what = list(model.parameters()), f"after step {s}"
        check_same_on_all_ranks(parameters, f"{what}, parameters")
        masters = list(amp.master_params(optimizer))
        check_same_on_all_ranks(masters, f"{what}, master weights")
        for parameter, master in zip(parameters, masters, strict=True):
            rounded = torch.equal(master.to(parameter.dtype), parameter)
            check(rounded, f"{what}: a parameter is not its master weight, rounded")
        if average is not None:
            with torch.no_grad():
                for mine, parameter in zip(average.parameters(), parameters, strict=True):
                    mine.mul_(0.5).add_(parameter, alpha=0.5)
            check_same_on_all_ranks(list(average.parameters()), f"{what}, averaged copy")
            saved_average = list(average.state_dict().values())
            check_same_on_all_ranks(saved_average[:2], f"{what}, averaged copy, saved")
    same = [torch.equal(a, b) for a, b in zip(first, model.parameters(), strict=True)]
    # A step may be below the precision of a large parameter.
    moved = sum(not each for each in same)
    check(moved >= len(same) - 1, f"parameters that did not change: {same}")
    check(curve[-1] < curve[0], f"the loss does not fall: {curve}")


def run_amp_cases(rank: int, world: int, seeds: list[int]) -> None:
    for seed in seeds:
        case = draw_case(seed)
        try:
            run_case(case, rank, world)
        except Exception as error:
            raise AssertionError(f"amp case of seed {seed}: {error!r}\n{case}") from error
        finally:
            forget_amp()
