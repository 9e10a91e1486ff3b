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
