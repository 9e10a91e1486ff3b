# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of several scale_loss contexts, and of contexts that clear them or fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from torch import Tensor, nn

from apex import amp


def _prepared(level: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)


def _backward(model: nn.Module, optimizer: Any, **options: Any) -> None:
    with amp.scale_loss(model(torch.ones(2, 3)).float().sum(), optimizer, **options) as scaled:
        scaled.backward()


def _grads(optimizer: Any) -> list[Tensor]:
    return [p.grad.clone() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_context_inside_one_of_the_same_optimizer_is_refused(level: str) -> None:
    model, optimizer = _prepared(level)
    _backward(model, optimizer)
    want = [2 * grad for grad in _grads(optimizer)]
    loss = model(torch.ones(2, 3)).float().sum()
    with (
        pytest.raises(RuntimeError, match="sum of the losses"),
        amp.scale_loss(loss, optimizer),
        amp.scale_loss(loss, optimizer),
    ):
        pass
    _backward(model, optimizer)
    for mine, expected in zip(_grads(optimizer), want, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_backward_outside_of_the_context_adds_an_unscaled_gradient(level: str) -> None:
    model, optimizer = _prepared(level)
    _backward(model, optimizer)
    want = [2 * grad for grad in _grads(optimizer)]
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).float().sum().backward()
        _backward(model, optimizer)
        for mine, expected in zip(_grads(optimizer), want, strict=True):
            assert torch.equal(mine, expected)


def _two_models(level: str) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    models = [nn.Linear(5, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    return amp.initialize(models, optimizers, opt_level=level, verbosity=0)


@pytest.mark.usefixtures("fresh_amp")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_zero_grad_after_an_overflow_leaves_the_next_step(level: str) -> None:
    (model, _), (optimizer, _) = _two_models(level)
    x = torch.randn(4, 5)
    with amp.scale_loss(model(x).float().square().mean() * float("inf"), optimizer) as loss:
        loss.backward()
    optimizer.zero_grad()
    before = [param.clone() for param in amp.master_params(optimizer)]
    with amp.scale_loss(model(x).float().square().mean(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    after = list(amp.master_params(optimizer))
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.usefixtures("fresh_amp")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("way", ["zero_grad", "zeros", "None", "optimizer"])
@pytest.mark.parametrize("skips", [False, True])
def test_gradients_cleared_between_forward_and_backward_are_not_stepped(
    level: str, way: str, skips: bool
) -> None:
    """Every gradient element is 1/4 in each iteration. Reference: that value times the steps."""
    model = nn.Linear(4, 3)
    for param in model.parameters():
        nn.init.zeros_(param)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    ways: dict[str, Any] = {
        "zero_grad": model.zero_grad,
        "zeros": lambda: model.zero_grad(set_to_none=False),
        "None": lambda: [setattr(param, "grad", None) for param in model.parameters()],
        "optimizer": optimizer.zero_grad,
    }
    skips = skips and level in ("O1", "O2")  # with a dynamic scale
    dtype = next(model.parameters()).dtype
    for iteration in range(5):
        bad = skips and iteration == 1
        loss = model(torch.ones(1, 4, dtype=dtype)).float().sum() * (float("inf") if bad else 0.25)
        with amp.scale_loss(loss, optimizer) as scaled:
            ways[way]()
            scaled.backward()
        optimizer.step()
    expected = -0.125 * (4 if skips else 5)
    for param in amp.master_params(optimizer):
        assert torch.equal(param.detach().float(), torch.full(param.shape, expected))


@pytest.mark.usefixtures("fresh_amp")
def test_loss_that_is_no_tensor_is_refused_in_one_sentence() -> None:
    (model, _), (optimizer, _) = _two_models("O1")
    with (
        pytest.raises(TypeError, match="a loss tensor with a grad_fn, not a float"),
        amp.scale_loss(0.0, optimizer),
    ):
        pass
    with pytest.raises(ValueError, match="pass a positive number or 'dynamic'"):
        amp.initialize(nn.Linear(2, 2), opt_level="O1", loss_scale="abc", verbosity=0)
