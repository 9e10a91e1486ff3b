# SPDX-License-Identifier: BSD-3-Clause
"""Any sequence of operations on gradients has the same effect with amp as without.

Random sequences of contexts, discarded batches, steps without a new backward, bodies that raise,
and gradients set to zero or None in several ways are compared with float32 without amp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from ddp_support import check_near, check_same_on_all_ranks, forget_amp
from torch import Tensor, nn

from apex import amp
from apex.parallel import DistributedDataParallel

#: Largest difference from float32, relative to the largest value.
TOLERANCE = {"O0": 1e-5, "O1": 5e-3, "O2": 5e-3, "O1-bf16": 3e-2, "O2-bf16": 3e-2}


class Net(nn.Module):
    """The second layer is used in some batches only. The norm is float32 at O2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        h = self.first(x)
        if both:
            h = h + self.second(x)
        return self.last(torch.tanh(self.norm(h)))


def _each(change: Callable[[nn.Parameter], None]) -> Callable[[Run], None]:
    def discard(run: Run) -> None:
        for param in run.net.parameters():
            if param.grad is not None:
                change(param)

    return discard


#: Ways to discard gradients.
DISCARDS: dict[str, Callable[[Any], None]] = {
    "optimizer": lambda run: run.optimizer.zero_grad(),
    "optimizer, zeros": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "model": lambda run: run.net.zero_grad(),
    "model, zeros": lambda run: run.net.zero_grad(set_to_none=False),
    "None": _each(lambda p: setattr(p, "grad", None)),
    "zero_": _each(lambda p: p.grad.zero_()),
    "data.zero_": _each(lambda p: p.grad.data.zero_()),
    "new zeros": _each(lambda p: setattr(p, "grad", torch.zeros_like(p.grad))),
}


class Run:
    """A sequence of operations at a level, or without amp (None)."""

    def __init__(
        self, level: str | None, world: int = 1, rank: int = 0, scale: Any = "dynamic"
    ) -> None:
        torch.manual_seed(0)
        self.net: nn.Module = Net()
        self.level, self.world, self.rank = level, world, rank
        # Without eps, rounding could flip the sign of the first steps.
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), lr=0.02, eps=0.1)
        self.wrapped = self.net
        if level is not None:
            self.net, self.optimizer = amp.initialize(
                self.net, self.optimizer, opt_level=level, loss_scale=scale,
                max_loss_scale=2.0**8, verbosity=0,
            )  # fmt: skip
            self.wrapped = DistributedDataParallel(self.net) if world > 1 else self.net
        self.overflowed = False

    def losses(self, seed: int, both: bool) -> list[Tensor]:
        """This rank's loss. Without amp, those of all ranks, each with its own statistics."""
        ranks = [self.rank] if self.level is not None else range(self.world)
        x = [
            torch.randn(8, 3, generator=torch.Generator().manual_seed(9 * seed + r)) for r in ranks
        ]
        parts = [self.wrapped(one, both).float().square().mean() for one in x]
        return [part / (self.world if self.level is None else 1) for part in parts]

    def backward(self, seed: int, kind: str, both: bool) -> None:
        loss = sum(self.losses(seed, both))
        if self.level is None:
            loss.backward()
            self.overflowed |= kind == "overflow"
            return
        delay = {"delay_unscale": kind == "delay"}
        with amp.scale_loss(loss, self.optimizer, **delay) as scaled:
            (scaled * (float("inf") if kind == "overflow" else 1.0)).backward()

    def step(self) -> None:
        if self.level is not None or not self.overflowed:
            self.optimizer.step()

    def run(self, sequence: list[tuple[Any, ...]]) -> None:
        for name, *arguments in sequence:
            if name == "discard":
                DISCARDS[arguments[0]](self)
                self.overflowed = False
            else:
                getattr(self, name)(*arguments)


def _compare(level: str, sequence: list[tuple[Any, ...]], world: int = 1, rank: int = 0) -> None:
    want = Run(None, world)
    want.run(sequence)
    mine = Run(level, world, rank)
    mine.run(sequence)
    what = f"{level}: {sequence}"
    # Before the masters are created, the optimizer holds the model's parameters.
    for master, expected in zip(
        amp.master_params(mine.optimizer), want.net.parameters(), strict=True
    ):
        check_near(master.detach().float(), expected.detach(), what, TOLERANCE[level])
    if world > 1:
        check_same_on_all_ranks([p.detach() for p in mine.net.parameters()], what)
    forget_amp()


@pytest.mark.parametrize("way", DISCARDS)
@pytest.mark.parametrize("level", TOLERANCE)
def test_discarded_batch_leaves_no_gradient(level: str, way: str) -> None:
    batch = ("backward", 1, "", True)
    _compare(level, [batch, ("discard", way), ("backward", 2, "", True), ("step",)])
    _compare(level, [batch, batch, ("discard", way), ("backward", 2, "", False), ("step",)])
    if "zero" not in way or "optimizer" in way or "O2" not in level:
        # At O2, zeros written between scale_loss and step do not reach the master weights.
        _compare(level, [batch, ("step",), batch, ("discard", way), ("step",)])


@pytest.mark.parametrize("way", ["optimizer", "optimizer, zeros"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_of_a_discarded_batch_skips_no_step(level: str, way: str) -> None:
    batch = ("backward", 1, "", True)
    overflow = ("backward", 3, "overflow", True)
    _compare(level, [batch, ("step",), overflow, ("discard", way), batch, ("step",)])


@pytest.mark.parametrize("level", TOLERANCE)
def test_step_twice_steps_with_the_same_gradients(level: str) -> None:
    batch = ("backward", 1, "", True)
    _compare(level, [batch, ("step",), ("step",)])
    _compare(level, [batch, ("step",), batch, ("step",), ("step",)])


@pytest.mark.parametrize("level", TOLERANCE)
def test_unused_layer_zeros_are_stepped_as_without_amp(level: str) -> None:
    both, one = ("backward", 1, "", True), ("backward", 2, "", False)
    for way in ("optimizer, zeros", "model, zeros"):
        _compare(level, [both, ("step",), ("discard", way), one, ("step",)])
        run = Run(level)
        run.run([both, ("step",), ("discard", way), one])
        assert run.net.second.weight.grad is not None and not run.net.second.weight.grad.any()


@pytest.mark.parametrize("level", ["O2", "O2-bf16"])
def test_model_gradients_are_the_rounded_sum_of_all_contexts(level: str) -> None:
    run = Run(level, scale=8.0)
    run.run([("backward", 1, "", True), ("backward", 2, "", False), ("backward", 3, "", False)])
    for param, master in zip(run.net.parameters(), amp.master_params(run.optimizer), strict=True):
        if param is not master:
            assert torch.equal(param.grad, (master.grad * 8.0).to(param.dtype))
