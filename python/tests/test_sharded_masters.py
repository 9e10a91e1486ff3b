# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer(shard_master_weights=True) with amp at level O2.

The reference is the plain optimizer with amp at O2, in the same process and with the same
gradients. All comparisons are bitwise.
"""

from __future__ import annotations

import copy
import gc
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_support import RankPool, check, check_equal, check_same_on_all_ranks, raises
from sharded_cases import OPTIMIZERS
from torch import Tensor, nn

from apex import amp
from apex.optimizers import ShardedOptimizer
from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

OPTIONS: dict[str, dict[str, Any]] = {
    name: {**OPTIMIZERS[name][1], **({"eps": 1e-3} if "adam" in name else {})}
    for name in ("momentum", "adamw", "adamw_fused", "fused_adam", "fused_lamb", "muon", "own")
}


def _net(name: str) -> nn.Module:
    torch.manual_seed(3)
    bias = name != "muon"
    net = nn.Sequential(nn.Linear(95, 130, bias=bias))
    if bias:
        net.append(nn.Conv2d(16, 97, 3).to(memory_format=torch.channels_last))
        net.append(nn.BatchNorm2d(97))  # stays float32
    net.append(nn.Linear(130, 95, bias=bias))
    if bias:
        net.append(nn.Linear(5, 5).requires_grad_(False))
        net.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
        net.register_parameter("never", nn.Parameter(torch.ones(7)))
    return net


class Run:
    """A model at O2 with a sharded (`group` is given) or the plain optimizer."""

    def __init__(self, name: str, dtype: torch.dtype, group: Any = None, **options: Any) -> None:
        self.net = _net(name)
        kind, defaults = OPTIMIZERS[name][0], OPTIONS[name]
        held = list(self.net.named_parameters())
        groups = [{"params": held[:1], "lr": 0.003}, {"params": held[1:]}]
        self.optimizer: Any
        if group is None:
            self.optimizer = kind(groups, **defaults)
        else:
            self.optimizer = ShardedOptimizer(
                groups, kind, group, shard_master_weights=True, **defaults
            )
        self.net, self.optimizer = amp.initialize(
            self.net,
            self.optimizer,
            opt_level="O2",
            cast_model_type=dtype,
            loss_scale="dynamic",
            verbosity=0,
            **options,
        )

    def backward(self, step: int, overflow: bool = False, **options: Any) -> None:
        """Gradients as backward in scale_loss leaves them, the same on every rank."""
        torch.manual_seed(100 + step)
        with amp.scale_loss(torch.ones(()), self.optimizer, **options) as loss:
            for name, p in self.net.named_parameters():
                if p.requires_grad and name != "never":
                    grad = (torch.randn_like(p, dtype=torch.float32) * float(loss) / 64).to(p.dtype)
                    p.grad = grad if p.grad is None else p.grad + grad
            if overflow:
                next(self.net.parameters()).grad[0] = float("inf")

    def step(self, step: int, clip: float = 0.0) -> None:
        if clip:
            self.norm = nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)


def _check_as(mine: Run, other: Run, what: str) -> None:
    for (name, p), q in zip(mine.net.named_parameters(), other.net.parameters(), strict=True):
        check_equal(p.detach(), q.detach(), f"{what}: {name}")
    check_same_on_all_ranks([p.detach() for p in mine.net.parameters()], what)
    for a, b in zip(mine.optimizer.param_groups, other.optimizer.param_groups, strict=True):
        a, b = ({k: v for k, v in g.items() if k not in ("params", "fused")} for g in (a, b))
        check_equal(repr(a), repr(b), f"{what}: settings")


def _tensors(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            for path, leaf in _tensors(value[key]):
                yield f"{key}.{path}", leaf
    else:
        yield "", value


def _check_state(mine: Run, other: Run, what: str) -> None:
    """The state dict of the sharded optimizer is the plain one's, with the master weights."""
    mine.optimizer.consolidate_state_dict(to=None)
    found, expected = mine.optimizer.state_dict(), other.optimizer.state_dict()
    check(found["amp_master_weights"], "no master weights")
    for key in ("state", "amp_master_weights"):
        pairs = zip(_tensors(found[key]), _tensors(expected[key]), strict=True)
        for (path, a), (path_too, b) in pairs:
            check_equal(path, path_too, f"{what}: entries")
            check_equal(a, b, f"{what}: {path}")


def _trains(rank: int, world: int, name: str, dtype: torch.dtype) -> None:
    mine, plain = Run(name, dtype, dist.group.WORLD), Run(name, dtype)
    for step in range(8):
        for run in (mine, plain):
            if step == 5:  # two contexts
                run.backward(90, delay_unscale=True)
                run.backward(91)
            if step == 6:
                run.backward(92)
            run.backward(step, overflow=step in (0, 3))
            run.step(step, clip=0.5 if step in (2, 5) else 0.0)
        if step in (2, 5):
            check_equal(mine.norm, plain.norm, "norm")
        _check_as(mine, plain, f"step {step}")
        if step in (0, 1, 4, 7):
            _check_state(mine, plain, f"step {step}")
    masters = [p for p in amp.master_params(mine.optimizer) if p.isnan().all()]
    check(len(masters) >= 2, "no master weight is sharded")


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("adamw", torch.float16),
        ("adamw_fused", torch.bfloat16),
        ("fused_adam", torch.float16),
        ("momentum", torch.bfloat16),
        ("fused_lamb", torch.float16),
        ("muon", torch.bfloat16),
        ("own", torch.float16),
    ],
)
def test_sharded_masters_step_as_whole_ones(
    ranks: RankPool, world: int, name: str, dtype: torch.dtype
) -> None:
    ranks.run(world, _trains, name, dtype)
