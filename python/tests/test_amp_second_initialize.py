# SPDX-License-Identifier: BSD-3-Clause
"""A second amp.initialize, for another model, does not change how the first model trains."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from torch import Tensor, nn

from apex import amp
from apex.amp import _amp_state

OTHERS: list[dict[str, Any]] = [
    {"enabled": False},
    {"opt_level": "O1", "loss_scale": 4.0},
    {"opt_level": "O3"},
]


def _pair(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _step(
    model: nn.Module, optimizer: Any, step: int, scaled: bool = True, inf: bool = False
) -> float:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    with contextlib.nullcontext() if scaled else amp.disable_casts():
        loss = (model(x).float() - 1).square().mean()
    context: Any = amp.scale_loss(loss, optimizer) if scaled else contextlib.nullcontext(loss)
    with context as scaled_loss:
        (scaled_loss * (float("inf") if inf else 1.0)).backward()
    optimizer.step()
    return loss.item()


def _masters(optimizer: Any) -> list[Tensor]:
    return [m.detach().float().clone() for m in amp.master_params(optimizer)]


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_first_model_trains_as_if_there_were_no_second(
    level: str, other: dict[str, Any], with_optimizer: bool
) -> None:
    def first(second: bool) -> tuple[list[Tensor], float, Any]:
        model, optimizer = amp.initialize(
            *_pair(0), opt_level=level, loss_scale="dynamic", verbosity=0
        )
        scaler = _amp_state.loss_scalers[0]
        for step in range(6):
            if second and step == 3:
                pair = _pair(1) if with_optimizer else _pair(1)[:1]
                amp.initialize(*pair, verbosity=0, **other)
            _step(model, optimizer, step, inf=step == 4)
        return _masters(optimizer), scaler.loss_scale(), amp.state_dict()

    want, scale, state = first(second=False)
    mine, my_scale, my_state = first(second=True)
    assert my_scale == scale < 2.0**16
    for a, b in zip(mine, want, strict=True):
        if level == "O1":  # casts belong to the thread, so the last initialize determines them
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
        else:
            assert torch.equal(a, b)
    if not with_optimizer:  # an inference model: the checkpoint is the first model's
        assert my_state == state


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_second_model_trains_at_its_own_level(other: dict[str, Any]) -> None:
    reference = _pair(1)
    amp.initialize(*_pair(0), opt_level="O2", verbosity=0)
    model, optimizer = amp.initialize(*_pair(1), verbosity=0, **other)
    losses = [_step(model, optimizer, step) for step in range(4)]
    want = [_step(*reference, step, scaled=False) for step in range(4)]
    assert losses == pytest.approx(want, rel=3e-2)
    with torch.no_grad():
        for a, b in zip(_masters(optimizer), reference[0].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=3e-2, atol=1e-2)
