# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints: other levels, shapes and numbers of scalers. (amp_programs.py resumes runs bit for
bit.)"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amp_support import fresh_amp  # noqa: F401
from torch import nn

from apex import amp
from apex.amp import _amp_state


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def initialize(model: nn.Module, optimizer: Any, level: str) -> tuple[nn.Module, Any]:
    return amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", num_losses=2, verbosity=0
    )


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).float(), torch.arange(8) % 3)
        with amp.scale_loss(loss, optimizer, loss_id=step % 2) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("source", ["O0", "O1", "O2", "O2-bf16"])
@pytest.mark.parametrize("target", ["O0", "O1", "O2", "O3-bf16"])
def test_checkpoint_of_one_level_loads_at_another(source: str, target: str) -> None:
    model, optimizer = initialize(*build(0), source)
    train(model, optimizer, range(2))
    state = model.state_dict()
    other, other_optimizer = initialize(*build(1), target)
    other.load_state_dict(state)
    other_optimizer.load_state_dict(optimizer.state_dict())
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-2, atol=1e-3)
    train(other, other_optimizer, range(2, 4))


def test_checkpoint_loaded_weights_survive_the_next_step() -> None:
    model, optimizer = initialize(*build(0), "O2")
    train(model, optimizer, range(2))
    other = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(2, 3))
    assert not model[0].weight.any(), "the masters of before came back"


def test_checkpoint_of_another_shape_is_refused_and_leaves_the_masters() -> None:
    def losses(refused: bool) -> list[float]:
        model, optimizer = initialize(*build(0), "O2")
        train(model, optimizer, range(2))
        if refused:
            state = {"0.weight": torch.zeros(5, 6)}
            with pytest.raises(RuntimeError, match="size mismatch"):
                model.load_state_dict(state, strict=False)
        return train(model, optimizer, range(2, 5))

    assert losses(refused=True) == losses(refused=False)


def test_state_dict_has_plain_values_in_apex_format() -> None:
    initialize(*build(0), "O2")
    state = amp.state_dict()
    assert state == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 65536.0, "unskipped": 0},
    }
    assert [type(v) for v in state["loss_scaler0"].values()] == [float, int]
    mine: Any = {"epoch": 1}
    assert amp.state_dict(destination=mine) is mine and "loss_scaler1" in mine


def test_load_state_dict_other_number_of_scalers_warns_and_loads_what_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    initialize(*build(0), "O2")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 7}})
    assert "1 loss scaler(s)" in capsys.readouterr().out
    assert _amp_state.loss_scalers[0].loss_scale() == 4.0
    assert _amp_state.loss_scalers[0]._unskipped == 7
    assert _amp_state.loss_scalers[1].loss_scale() == 65536.0
    with pytest.raises(RuntimeError, match="'epoch'"):
        amp.load_state_dict({"loss_scaler0": {}, "epoch": 1})


@pytest.mark.parametrize("level", ["O2", "O3-bf16"])
def test_assigning_a_float32_state_to_a_cast_model_is_refused(level: str) -> None:
    model, optimizer = initialize(*build(0), level)
    train(model, optimizer, range(2))
    parameters, values = list(model.parameters()), copy.deepcopy(model.state_dict())
    other = {name: torch.zeros_like(value) for name, value in values.items()}
    for module, prefix in ((model, ""), (nn.ModuleDict({"inner": model}), "inner.")):
        state = {prefix + name: value for name, value in other.items()}
        with pytest.raises(RuntimeError, match=r"0\.weight.* load without assign=True"):
            module.load_state_dict(state, assign=True)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name
    model.load_state_dict(values)
