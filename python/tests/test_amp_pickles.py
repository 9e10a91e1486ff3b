# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers that amp does not know yet: created after initialize and loaded, or unpickled."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from amp_checkpoint_support import OPTIMIZERS, build, initialize, through_file, train
from amp_support import fresh_amp  # noqa: F401
from torch import nn

from apex import amp
from apex.optimizers import FusedLAMB

MAKERS = {**OPTIMIZERS, "lamb": lambda p: FusedLAMB(p, lr=1e-3)}


def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model at O2 and an optimizer that amp does not know."""
    model, _ = build(0, "sgd")
    model = amp.initialize(model, opt_level="O2", loss_scale="dynamic", num_losses=2, verbosity=0)
    return model, MAKERS[name](model.parameters())


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("name", MAKERS)
def test_optimizer_made_after_initialize_resumes_bit_for_bit(name: str, order: str) -> None:
    model, optimizer = make(name)
    train(model, optimizer, range(4), overflow_at=2)
    parts = {"model": model, "optimizer": optimizer, "amp": amp}
    saved = through_file({key: part.state_dict() for key, part in parts.items()})
    expected = train(model, optimizer, range(4, 8))

    other, other_optimizer = make(name)
    for part in (other, other_optimizer) if order == "model first" else (other_optimizer, other):
        part.load_state_dict(saved["model" if part is other else "optimizer"])
    amp.load_state_dict(saved["amp"])
    assert train(other, other_optimizer, range(4, 8)) == expected
    for key, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


def test_loading_leaves_optimizers_of_other_models_alone() -> None:
    make("sgd")
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(3, 2).to(dtype)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.load_state_dict(optimizer.state_dict())
        assert not hasattr(optimizer, "_amp_stash")
        assert optimizer.param_groups[0]["params"][0] is model.weight


def test_parameter_unfrozen_before_a_load_keeps_a_float32_state() -> None:
    model, optimizer = initialize(*build(0, "adam"), "O2")
    train(model, optimizer, range(3))
    saved = through_file(optimizer.state_dict())
    model, optimizer = build(1, "adam")
    model[0].weight.requires_grad_(False)
    model, optimizer = initialize(model, optimizer, "O2")
    train(model, optimizer, range(1))
    model[0].weight.requires_grad_(True)
    optimizer.load_state_dict(saved)
    moment = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    assert torch.equal(moment, saved["state"][0]["exp_avg_sq"])


def test_new_optimizer_of_parameters_frozen_at_initialize_loads_a_float32_state() -> None:
    model, _ = build(0, "adam")
    model = amp.initialize(model.requires_grad_(False), opt_level="O2", verbosity=0)
    optimizer = OPTIMIZERS["adam"](model.requires_grad_(True).parameters())
    fresh = OPTIMIZERS["adam"](build(0, "adam")[0].parameters())
    for param in fresh.param_groups[0]["params"]:
        param.grad = torch.full_like(param, 1e-5)
    fresh.step()
    optimizer.load_state_dict(fresh.state_dict())
    for value in optimizer.state_dict()["state"].values():
        assert value["exp_avg_sq"].dtype == torch.float32 and value["exp_avg_sq"].all()


def through_pickle(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def through_torch_file(pair: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(pair, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("through", [through_pickle, through_torch_file])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("trained", [0, 3])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("level", ["O1", "O2", "O2-bf16"])
def test_unpickled_pair_trains_bit_for_bit_as_the_original(
    level: str, name: str, trained: int, order: str, through: Callable[[Any], Any]
) -> None:
    model, _ = build(0, "sgd")
    model, optimizer = initialize(model, MAKERS[name](model.parameters()), level)
    train(model, optimizer, range(trained))
    if order == "model first":
        other, other_optimizer = through((model, optimizer))
    else:
        other_optimizer, other = through((optimizer, model))
    start = through(other.state_dict())
    scalers = amp.state_dict()
    expected = train(model, optimizer, range(3, 8), overflow_at=5)
    for key, value in other.state_dict().items():
        assert torch.equal(value, start[key]), f"the original's steps changed {key} of the loaded"
    amp.load_state_dict(scalers)
    assert train(other, other_optimizer, range(3, 8), overflow_at=5) == expected
    for key, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


def test_unpickled_optimizer_loads_a_state_before_it_trains() -> None:
    model, optimizer = initialize(*build(0, "adam"), "O2")
    train(model, optimizer, range(3))
    other, other_optimizer = through_pickle((model, optimizer))
    state = through_pickle(optimizer.state_dict())
    other_optimizer.load_state_dict(state)
    scalers = amp.state_dict()
    expected = train(model, optimizer, range(3, 6))
    amp.load_state_dict(scalers)
    assert train(other, other_optimizer, range(3, 6)) == expected


def test_pickled_pair_of_two_optimizers_of_one_parameter_trains_as_the_original() -> None:
    model, _ = build(0, "sgd")
    both = [OPTIMIZERS[name](model.parameters()) for name in ("sgd", "adam")]
    model, both = initialize(model, both, "O2")

    def steps(model: nn.Module, both: Any, steps: range) -> None:
        for step in steps:
            train(model, both[step % 2], range(step, step + 1))

    steps(model, both, range(4))
    other, other_both = through_pickle((model, both))
    scalers = amp.state_dict()
    steps(model, both, range(4, 8))
    amp.load_state_dict(scalers)
    steps(other, other_both, range(4, 8))
    for key, value in other.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
