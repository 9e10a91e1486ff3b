# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints: a resumed run is bitwise equal to an uninterrupted one."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from amp_checkpoint_support import OPTIMIZERS, build, initialize, through_file, train
from amp_support import fresh_amp  # noqa: F401
from torch import nn

from apex import amp
from apex.amp import _amp_state

LEVELS = ["O0", "O1", "O2", "O3", "O1-bf16", "O2-bf16", "O3-bf16"]


def restore(order: str, saved: dict[str, Any], optimizer_name: str, level: str) -> tuple[Any, Any]:
    model, optimizer = build(99, optimizer_name)
    if order == "load, initialize":
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        model, optimizer = initialize(model, optimizer, level)
    else:
        model, optimizer = initialize(model, optimizer, level)
        if order == "train first":
            train(model, optimizer, range(50, 52))
        parts = [(model, "model"), (optimizer, "optimizer")]
        for part, name in parts if "model first" in order else reversed(parts):
            part.load_state_dict(saved[name])
    amp.load_state_dict(saved["amp"])
    return model, optimizer


@pytest.mark.parametrize(
    "order",
    ["load, initialize", "initialize, model first", "initialize, optimizer first", "train first"],
)
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_checkpoint_resumed_run_is_bit_for_bit_the_same(
    level: str, optimizer_name: str, order: str
) -> None:
    model, optimizer = initialize(*build(0, optimizer_name), level)
    train(model, optimizer, range(4), overflow_at=2)
    saved = through_file(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        }
    )
    expected = train(model, optimizer, range(4, 8))
    final = {name: value.clone() for name, value in model.state_dict().items()}
    scalers = amp.state_dict()

    model, optimizer = restore(order, saved, optimizer_name, level)
    assert train(model, optimizer, range(4, 8)) == expected
    assert amp.state_dict() == scalers
    for name, value in model.state_dict().items():
        assert torch.equal(value, final[name]), name


@pytest.mark.parametrize("source", ["O0", "O1", "O2", "O2-bf16"])
@pytest.mark.parametrize("target", ["O0", "O1", "O2", "O3-bf16"])
def test_checkpoint_of_one_level_loads_at_another(source: str, target: str) -> None:
    model, optimizer = initialize(*build(0, "sgd"), source)
    train(model, optimizer, range(2))
    state = model.state_dict()
    other, other_optimizer = initialize(*build(1, "sgd"), target)
    other.load_state_dict(state)
    other_optimizer.load_state_dict(optimizer.state_dict())
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-2, atol=1e-3)
    train(other, other_optimizer, range(2, 4))


def test_checkpoint_loaded_weights_survive_the_next_step() -> None:
    model, optimizer = initialize(*build(0, "sgd"), "O2")
    train(model, optimizer, range(2))
    other = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(2, 3))
    assert not model[0].weight.any(), "the masters of before came back"


def test_checkpoint_of_another_shape_is_refused_and_leaves_the_masters() -> None:
    def losses(refused: bool) -> list[float]:
        model, optimizer = initialize(*build(0, "sgd"), "O2")
        train(model, optimizer, range(2))
        if refused:
            state = {"0.weight": torch.zeros(5, 6)}
            with pytest.raises(RuntimeError, match="size mismatch"):
                model.load_state_dict(state, strict=False)
        return train(model, optimizer, range(2, 5))

    assert losses(refused=True) == losses(refused=False)


def test_state_dict_has_plain_values_in_apex_format() -> None:
    initialize(*build(0, "sgd"), "O2")
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
    initialize(*build(0, "sgd"), "O2")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 7}})
    assert "1 loss scaler(s)" in capsys.readouterr().out
    assert _amp_state.loss_scalers[0].loss_scale() == 4.0
    assert _amp_state.loss_scalers[0]._unskipped == 7
    assert _amp_state.loss_scalers[1].loss_scale() == 65536.0
    with pytest.raises(RuntimeError, match="'epoch'"):
        amp.load_state_dict({"loss_scaler0": {}, "epoch": 1})


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O2-bf16"])
def test_deep_copy_of_model_and_optimizer_trains_as_the_original(
    level: str, optimizer_name: str, trained: int, order: str
) -> None:
    model, optimizer = initialize(*build(0, optimizer_name), level)
    train(model, optimizer, range(trained))
    if order == "model first":
        other, other_optimizer = copy.deepcopy((model, optimizer))
    else:
        other_optimizer, other = copy.deepcopy((optimizer, model))
    start = other[0].weight.detach().clone()
    scalers = amp.state_dict()
    expected = train(model, optimizer, range(3, 6), overflow_at=4)
    amp.load_state_dict(scalers)
    assert torch.equal(other[0].weight, start), "the original's steps changed the copy"
    assert train(other, other_optimizer, range(3, 6), overflow_at=4) == expected
    for name, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.parametrize("trained", [0, 3])
def test_deep_copy_of_a_model_or_a_part_of_it_keeps_float32_values(trained: int) -> None:
    model, optimizer = initialize(*build(0, "sgd"), "O2")
    train(model, optimizer, range(trained))
    state = copy.deepcopy(model.state_dict())
    rounded = state["0.weight"].half().float()
    assert not torch.equal(state["0.weight"], rounded)
    copied = copy.deepcopy(model)
    twice = copy.deepcopy(copied)
    assert torch.equal(copy.deepcopy(model[0]).state_dict()["weight"], state["0.weight"])
    train(model, optimizer, range(3, 5))
    for name, value in state.items():
        assert torch.equal(copied.state_dict()[name], value), name
        assert torch.equal(twice.state_dict()[name], value), name
    with torch.no_grad():
        copied[0].weight.fill_(1 / 3)
    assert torch.equal(copied.state_dict()["0.weight"], copied[0].weight.float())
    pickled = copy.deepcopy(pickle.loads(pickle.dumps(model)))
    assert pickled.state_dict()["0.weight"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masters_of_parameters_added_later_keep_the_precision_of_before_the_cast(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).to(dtype)
    exact = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.0)
    model, optimizer = initialize(model, optimizer, "O2")
    train(model, optimizer, range(1))
    optimizer.add_param_group({"params": model[1].parameters()})
    for master, value in zip(amp.master_params(optimizer), exact, strict=True):
        assert torch.equal(master, value)


@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("level", ["O2", "O2-bf16"])
def test_pickled_model_keeps_float32_values(level: str, trained: int) -> None:
    model, optimizer = initialize(*build(0, "sgd"), level)
    train(model, optimizer, range(trained))
    state = copy.deepcopy(model.state_dict())
    assert not torch.equal(state["0.weight"], model[0].weight.float())
    pickled = pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(pickled, buffer)
    buffer.seek(0)
    twice = torch.load(buffer, weights_only=False)
    for other in (pickled, twice, copy.deepcopy(twice), pickle.loads(pickle.dumps(model[0]))):
        for name, value in other.state_dict().items():
            assert torch.equal(value, state[name if name in state else f"0.{name}"]), name
    # A pickled model continues training from these values.
    another = torch.optim.SGD(twice.parameters(), lr=0.0)
    train(twice, another, range(3, 4))
    for master, name in zip(
        amp.master_params(another), dict(model.named_parameters()), strict=True
    ):
        assert torch.equal(master, state[name]), name
    with torch.no_grad():
        pickled[0].weight.fill_(1 / 3)
    assert torch.equal(pickled.state_dict()["0.weight"], pickled[0].weight.float())


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("level", ["O2", "O2-bf16"])
def test_values_loaded_into_a_frozen_parameter_count_when_it_is_unfrozen(
    level: str, order: str
) -> None:
    model, optimizer = initialize(*build(0, "sgd"), level)
    train(model, optimizer, range(3))
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer = build(1, "sgd")
    model[0].weight.requires_grad_(False)
    model, optimizer = initialize(model, optimizer, level)
    for part in (model, optimizer) if order == "model first" else (optimizer, model):
        part.load_state_dict(saved["model" if part is model else "optimizer"])
    train(model, optimizer, range(3, 5))
    assert torch.equal(model.state_dict()["0.weight"], saved["model"]["0.weight"])
    model[0].weight.requires_grad_(True)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(5, 6))
    master = next(amp.master_params(optimizer))
    assert master.dtype == torch.float32 and torch.equal(master, saved["model"]["0.weight"])


@pytest.mark.parametrize("level", ["O2", "O3-bf16"])
def test_assigning_a_float32_state_to_a_cast_model_is_refused(level: str) -> None:
    model, optimizer = initialize(*build(0, "sgd"), level)
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


class Images(nn.Module):
    """At O1 its output is float16, so its plain mean would be a float16 loss."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(1))
        self.convolution, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu(self.convolution(self.factor * x)))


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("initialize_first", [True, False])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_model_restored_beside_the_first_without_amps_state_trains_on_as_that(
    level: str, initialize_first: bool, losses: int
) -> None:
    """As in NVIDIA's test of restoring: the scalers of the second model are new, and stay so.

    So no step may be skipped only because of the first scale, 2^16.
    """

    def make() -> tuple[nn.Module, Any]:
        model = Images()
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def with_amp(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        return amp.initialize(model, optimizer, opt_level=level, num_losses=2 * losses, verbosity=0)

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, ids: range) -> torch.Tensor:
        optimizer.zero_grad()
        output = model(x)
        for loss_id in ids:
            with amp.scale_loss(output.mean(), optimizer, loss_id=loss_id) as scaled:
                scaled.backward(retain_graph=True)
        optimizer.step()
        return output.detach()

    model, optimizer = with_amp(*make())
    other: nn.Module | None = None
    for number in range(6):
        x = torch.randn(8, 3, 12, 12)
        output = step(model, optimizer, x, range(losses))
        if number == 0 and level in ("O1", "O2"):
            state = amp.state_dict()["loss_scaler0"]
            assert state == {"loss_scale": 65536.0, "unskipped": 1}
        if number == 2:
            saved = through_file([model.state_dict(), optimizer.state_dict()])
            other, its = with_amp(*make()) if initialize_first else make()
            other.load_state_dict(saved[0])
            its.load_state_dict(saved[1])
            if not initialize_first:
                other, its = with_amp(other, its)
        elif other is not None:
            assert torch.equal(output, step(other, its, x, range(losses, 2 * losses)))
            for name, value in model.state_dict().items():
                assert torch.equal(value, other.state_dict()[name]), name
