# SPDX-License-Identifier: BSD-3-Clause
"""Random programs with a ShardedOptimizer.

The reference is the plain optimizer on a copy of the module, with the same gradients. Parameters,
settings and state must match it bitwise, and be bitwise equal on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from typing import Any

import torch
import torch.distributed as dist
from ddp_support import DEVICE, check, check_equal, check_same_on_all_ranks, host_channel
from torch import Tensor, nn

from apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedNovoGrad,
    FusedSGD,
    ShardedOptimizer,
)
from apex.parallel import DistributedDataParallel


class RowNormalized(torch.optim.Optimizer):
    """Uses more than a single element, and counts its steps in the group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = self.state[p].setdefault("mean", torch.zeros_like(p))
                held.lerp_(p.grad, 0.5)
                p.sub_(held / (held.norm() + 1e-3), alpha=group["lr"] / group["steps"])


#: Constructors with arguments. Muon accepts only two-dimensional parameters.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.005, "momentum": 0.9, "nesterov": True}),
    "sgd_fused": (torch.optim.SGD, {"lr": 0.01, "fused": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "asgd": (torch.optim.ASGD, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
    "rprop": (torch.optim.Rprop, {}),
    "fused_adam": (FusedAdam, {"lr": 1e-2}),
    "fused_sgd": (FusedSGD, {"lr": 5e-3, "momentum": 0.9}),
    "fused_adagrad": (FusedAdagrad, {"lr": 1e-2}),
    "fused_lamb": (FusedLAMB, {"lr": 1e-2, "max_grad_norm": 0.5}),
    "fused_novograd": (FusedNovoGrad, {"lr": 1e-2}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "muon": (torch.optim.Muon, {"lr": 1e-2}),
    "own": (RowNormalized, {}),
    "function": (functools.partial(torch.optim.SGD, momentum=0.5), {"lr": 0.005}),
}


class Net(nn.Module):
    def __init__(self, pick: random.Random, matrices: bool) -> None:
        super().__init__()
        self.wide = nn.Linear(9, pick.choice([33, 900]), bias=not matrices)
        self.inner = nn.ModuleList(
            nn.Linear(self.wide.out_features, self.wide.out_features, bias=not matrices)
            for _ in range(pick.randint(0, 2))
        )
        self.sometimes = nn.Linear(
            self.wide.out_features, self.wide.out_features, bias=not matrices
        )
        self.head = nn.Linear(self.wide.out_features, 3, bias=not matrices)
        if not matrices:
            self.conv = nn.Conv2d(3, pick.choice([2, 70]), 3, padding=1)
            if pick.random() < 0.5:
                self.conv.to(memory_format=torch.channels_last)
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.nothing = nn.Parameter(torch.empty(0))
        self.frozen = nn.Linear(3, 4, bias=not matrices).requires_grad_(False)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        y = torch.tanh(self.wide(x))
        for layer in self.inner:
            y = y + torch.tanh(layer(y))
        if use:
            y = y + torch.tanh(self.sometimes(y))
        out = self.head(y)
        if hasattr(self, "conv"):
            out = out * self.scale + self.conv(x.view(-1, 3, 3, 1).expand(-1, 3, 3, 3)).mean()
        return out


class Case:
    def __init__(self, seed: int) -> None:
        self.pick = pick = random.Random(seed)
        self.name = pick.choice(list(OPTIMIZERS))
        self.kind, self.defaults = OPTIMIZERS[self.name]
        self.dtype = pick.choice([torch.float32] * 4 + [torch.float64, torch.bfloat16])
        self.channel = pick.choice(["1", "1", "0"])
        self.ddp: dict[str, Any] = pick.choice(
            [{}, {"gradient_as_bucket_view": True}, {"gradient_average": "weighted"}]
        )
        self.steps = pick.randint(3, 7)
        self.grouped = pick.choice(["one", "two", "named"])
        self.scaler = self.dtype == torch.float32 and pick.random() < 0.2
        self.scheduler = pick.random() < 0.3
        self.clips = pick.random() < 0.3

    def __repr__(self) -> str:
        return f"{self.name} {self.dtype} channel={self.channel} {self.grouped}"


def _groups(net: nn.Module, kind: str) -> Any:
    named = list(net.named_parameters())
    if kind == "named":
        return named
    if kind == "one":
        return [p for _, p in named]
    return [
        {"params": [p for _, p in named[:2]], "lr": 0.002},
        {"params": [p for _, p in named[2:]]},
    ]


class Pair:
    """A module with a ShardedOptimizer, and a copy with the plain optimizer."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        self.case = case
        pick = case.pick
        torch.manual_seed(50 + rank)  # the wrapper broadcasts rank 0's
        matrices = case.name == "muon"
        self.net = Net(pick, matrices).to(case.dtype)
        self.wrapped = DistributedDataParallel(self.net, **case.ddp)
        self.twin = copy.deepcopy(self.net)
        self.sharded = self.make()
        self.plain = case.kind(_groups(self.twin, case.grouped), **case.defaults)
        self.scalers = [torch.amp.GradScaler(DEVICE, init_scale=8.0) for _ in range(2)]
        self.schedulers: list[Any] = []
        if case.scheduler:
            self.schedulers = [
                torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (self.sharded, self.plain)
            ]

    def make(self, group: Any = None) -> ShardedOptimizer:
        case = self.case
        groups = _groups(self.net, case.grouped)
        return ShardedOptimizer(groups, case.kind, process_group=group, **case.defaults)

    def backward(self, rank: int) -> None:
        """Run backward of the wrapped module, and copy the gradients to the twin."""
        case, pick = self.case, self.case.pick
        to_none = pick.random() < 0.7
        self.sharded.zero_grad(set_to_none=to_none)
        use = pick.random() < 0.7
        parts = pick.randint(1, 2)
        for part in range(parts):
            torch.manual_seed(pick.randrange(10**6) * 7 + rank)
            x = torch.randn(4, 9, dtype=case.dtype)
            weighted = case.ddp.get("gradient_average") == "weighted"
            with (
                contextlib.nullcontext() if part + 1 == parts else self.wrapped.no_sync(),
                self.wrapped.weight(2) if weighted else contextlib.nullcontext(),
            ):
                loss = self.wrapped(x, use).square().mean()
                (self.scalers[0].scale(loss) if case.scaler else loss).backward()
        if case.scaler:
            self.scalers[1].scale(torch.zeros(()))  # creates its state
        for p, q in zip(self.net.parameters(), self.twin.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.detach().clone()

    def step(self) -> None:
        case = self.case
        for net, optimizer, scaler in (
            (self.net, self.sharded, self.scalers[0]),
            (self.twin, self.plain, self.scalers[1]),
        ):
            if case.clips:
                if case.scaler:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            if case.scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def check(self, what: str) -> None:
        for (name, p), q in zip(self.net.named_parameters(), self.twin.parameters(), strict=True):
            check_equal(p.detach(), q.detach(), f"{what}: {name}")
        check_same_on_all_ranks([p.detach() for p in self.net.parameters()], what)
        for mine, theirs in zip(self.sharded.param_groups, self.plain.param_groups, strict=True):
            for name, value in theirs.items():  # torch adds settings after a load
                if name != "params":
                    check_equal(repr(mine[name]), repr(value), f"{what}: {name}")

    def check_state(self, state: dict[str, Any], what: str) -> None:
        expected = self.plain.state_dict()
        check_equal(sorted(state["state"]), sorted(expected["state"]), f"{what}: whose state")
        for key, held in expected["state"].items():
            check_equal(list(state["state"][key]), list(held), f"{what}: entries of {key}")
            for name, value in held.items():
                found = state["state"][key][name]
                if isinstance(value, Tensor):
                    check_equal(found.shape, value.shape, f"{what}: shape of {name} of {key}")
                    check(torch.equal(found, value.cpu()), f"{what}: {name} of {key}")
                else:
                    check_equal(found, value, f"{what}: {name} of {key}")
        for found, group in zip(state["param_groups"], expected["param_groups"], strict=True):
            for name, value in group.items():
                check_equal(repr(found[name]), repr(value), f"{what}: {name} of a group")


def _resume(pair: Pair, rank: int, world: int, groups: list[list[Any]]) -> None:
    """Resume with an optimizer of other ranks, from a state dict of either."""
    pick = pair.case.pick
    pair.sharded.consolidate_state_dict(to=None)
    state = pair.sharded.state_dict()
    pair.check_state(state, "consolidated")
    # The plain optimizer loads it too, because torch casts some entries when it loads.
    fresh = pair.case.kind(_groups(pair.twin, pair.case.grouped), **pair.case.defaults)
    fresh.load_state_dict(copy.deepcopy(state))
    if pick.random() < 0.5:
        state = copy.deepcopy(pair.plain.state_dict())
    pair.plain = fresh
    first = pick.randrange(world) + 1
    pair.sharded = pair.make(groups[first - 1][0 if rank < first else 1])
    pair.sharded.load_state_dict(state)
    for i, optimizer in enumerate((pair.sharded, pair.plain)):
        if pair.schedulers:
            old = pair.schedulers[i].state_dict()
            pair.schedulers[i] = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            pair.schedulers[i].load_state_dict(old)
            for group, lr in zip(optimizer.param_groups, old["_last_lr"], strict=True):
                group["lr"] = lr


def run_seeds(rank: int, world: int, seeds: list[int]) -> None:
    # All partitions of the ranks into two groups. Every rank must create every group.
    groups = [
        [
            dist.new_group(list(range(first))),
            dist.new_group(list(range(first, world))) if first < world else None,
        ]
        for first in range(1, world + 1)
    ]
    for seed in seeds:
        case = Case(seed)
        try:
            with host_channel(case.channel):
                _run(rank, world, case, groups)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {world} ranks, {case}: {error}") from error


def _run(rank: int, world: int, case: Case, groups: list[list[Any]]) -> None:
    pair = Pair(case, rank, world)
    pick = case.pick
    grown = False
    for step in range(case.steps):
        if step == 2 and pick.random() < 0.2 and case.name != "muon":
            for net, optimizer in ((pair.net, pair.sharded), (pair.twin, pair.plain)):
                extra = nn.Linear(3, 5, dtype=case.dtype)
                with torch.no_grad():
                    for p in extra.parameters():
                        p.fill_(0.25)
                net.extra = extra
                if case.grouped == "named":
                    named = [(f"extra.{n}", p) for n, p in extra.named_parameters()]
                    optimizer.add_param_group({"params": named})
                else:
                    optimizer.add_param_group({"params": list(extra.parameters())})
            pair.schedulers = []  # torch's schedulers do not support added groups
            grown = True
        if pick.random() < 0.15:  # frozen, or trained again
            for net in (pair.net, pair.twin):
                layer = net.wide  # type: ignore[attr-defined]
                layer.requires_grad_(not layer.weight.requires_grad)
                layer.zero_grad()
        pair.backward(rank)
        pair.step()
        pair.check(f"step {step}")
        if pick.random() < 0.25 and not grown:
            _resume(pair, rank, world, groups)
