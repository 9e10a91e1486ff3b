# SPDX-License-Identifier: BSD-3-Clause
"""Master weights changed by code other than the optimizer's step: SAM, clamps, restores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from torch import Tensor, nn

from apex import amp
from apex.amp import _amp_state

#: Largest difference from float64.
TOLERANCE = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O1-bf16": 2e-2, "O2-bf16": 2e-2}
MASTERS = ["O2", "O2-bf16"]


class Sam:
    """Sharpness-aware minimization (Foret et al., 2021), written manually around the optimizer that
    amp knows, as in scripts."""

    def __init__(self, optimizer: torch.optim.Optimizer, restore: str) -> None:
        self.optimizer, self.rho, self.restore = optimizer, 0.5, restore
        self.before: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def first_step(self) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        self.before = [(p, p.data.clone()) for p in params]
        for p in params:
            p.add_(p.grad * (self.rho / norm))
        self.optimizer.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p, value in self.before:
            if self.restore == "set":
                p.data = value
            else:
                p.data.copy_(value)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _make(level: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return amp.initialize(
        model, optimizer, opt_level=level, verbosity=0, max_loss_scale=2.0**8, **options
    )


def _trained(level: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = _make(level)
    for step in range(steps):
        _backward(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _backward(model: nn.Module, optimizer: Any, step: int, bad: bool = False) -> None:
    x = torch.rand(16, 4, generator=torch.Generator().manual_seed(step))
    with amp.disable_casts():
        wanted = x.sum(1, keepdim=True).to(next(model.parameters()).dtype)
    loss = (model(x.to(wanted.dtype)).double() - wanted.double()).square().mean()
    scaling: Any = contextlib.nullcontext(loss)
    if optimizer is not None:
        scaling = amp.scale_loss(loss, optimizer)
    with scaling as scaled:
        (scaled * float("inf") if bad else scaled).backward()


def _sam(level: str | None, overflow: tuple[int, int] | None, restore: str = "set") -> list[Tensor]:
    """Parameters in float64 after four steps; `overflow` is (step, which of its two gradients)."""
    if level is None:
        model = _net().double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        model, optimizer = _make(level)
    sam = Sam(optimizer, restore)
    for step in range(4):
        if level is None and overflow is not None and overflow[0] == step:
            continue
        known = None if level is None else optimizer
        _backward(model, known, step, bad=(step, 0) == overflow)
        sam.first_step()
        if level in MASTERS:
            optimizer._master_params_to_model_params()
        _backward(model, known, step, bad=(step, 1) == overflow)
        sam.second_step()
    return [p.detach().double() for g in optimizer.param_groups for p in g["params"]]


@pytest.mark.parametrize("overflow", [None, (0, 0), (0, 1), (2, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("restore", ["set", "copy"])
@pytest.mark.parametrize("level", TOLERANCE)
def test_sam_follows_float64(level: str, restore: str, overflow: tuple[int, int] | None) -> None:
    if overflow is not None and level not in ("O1", "O2"):
        pytest.skip("a static scale never skips")
    mine = _sam(level, overflow, restore)
    _amp_state.handle and _amp_state.handle._deactivate()
    want = _sam(None, overflow)
    for a, b in zip(mine, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE[level])


def _add(master: Tensor) -> None:
    with torch.no_grad():
        master.add_(0.25)


def _set_data(master: Tensor) -> None:
    master.data = master.data + 0.25


def _write_data(master: Tensor) -> None:
    master.data.add_(0.25)


WRITES = [_add, _set_data, _write_data]


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("level", MASTERS)
def test_changed_masters_reach_the_model_and_stay(
    level: str, write: Callable[[Tensor], None], trained: int
) -> None:
    model, optimizer = _trained(level, trained)
    before = [m.detach().clone() for m in amp.master_params(optimizer)]
    for master in amp.master_params(optimizer):
        write(master)
    optimizer._master_params_to_model_params()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    _backward(model, optimizer, 5)
    optimizer.step()
    state = model.state_dict()
    parameters = dict(model.named_parameters())
    for name, master, old in zip(parameters, amp.master_params(optimizer), before, strict=True):
        assert torch.equal(master, old + 0.25)
        assert torch.equal(parameters[name], master.to(parameters[name].dtype))
        assert torch.equal(state[name], master)
