# SPDX-License-Identifier: BSD-3-Clause
"""FP16_Optimizer against float32. (Skips, resumes, LARC and two ranks: amp_programs.py.)"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from apex import fp16_utils
from apex.amp.scaler import LossScaler
from apex.fp16_utils import FP16_Optimizer, convert_network

HALF, F32 = torch.float16, torch.float32


def net(dtype: torch.dtype | None = HALF) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    return model if dtype is None else convert_network(model, dtype)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(8, 4, generator=generator), torch.rand(8, 2, generator=generator)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x, y = batch(step)
    return (model(x.to(model[0].weight.dtype)).float() - y).pow(2).mean()


def wrap(model: nn.Module, **options: Any) -> FP16_Optimizer:
    return FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), **options)


OPTIONS = {
    "static 1": {},
    "static 128": {"static_loss_scale": 128.0},
    "dynamic": {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**10}},
    "dynamic args": {
        "dynamic_loss_scale": True,
        "dynamic_loss_args": {"init_scale": 2.0**8, "scale_window": 3, "scale_factor": 4.0},
    },
}


def overflow(optimizer: FP16_Optimizer, model: nn.Module) -> None:
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 0), update_master_grads=False)
    model[0].weight.grad[0, 0] = float("nan")
    optimizer.update_master_grads()


def test_overflow_skips_the_step_and_lowers_the_scale(capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    optimizer = wrap(model, dynamic_loss_scale=True)
    before = model[0].weight.detach().clone()
    overflow(optimizer, model)
    assert optimizer.overflow and optimizer.loss_scale == 2.0**15
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert torch.equal(before, model[0].weight)
    assert "Gradient overflow" in capsys.readouterr().out
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 0))
    optimizer.step()
    assert not optimizer.overflow and not torch.equal(before, model[0].weight)


def test_static_scale_does_not_look_for_overflow() -> None:
    model = net()
    optimizer = wrap(model, static_loss_scale=2.0, verbose=False)
    overflow(optimizer, model)
    assert not optimizer.overflow and optimizer.loss_scale == 2.0
    optimizer.loss_scale = 8.0
    assert optimizer.loss_scale == 8.0


def test_clip_master_grads_limits_the_unscaled_norm() -> None:
    model = net()
    optimizer = wrap(model, static_loss_scale=64.0)
    optimizer.backward(loss_of(model, 0))
    norm = optimizer.clip_master_grads(1e-3)
    assert 1e-3 < norm < 10
    grads = [grad.flatten() for grad in optimizer.inspect_master_grad_data()[0]]
    assert torch.cat(grads).norm() == pytest.approx(1e-3, rel=1e-4)


def test_closure_with_lbfgs_matches_float32() -> None:
    model, reference = net(), net(None)
    options = {"lr": 0.1, "max_iter": 4}
    optimizer = FP16_Optimizer(
        torch.optim.LBFGS(model.parameters(), **options), static_loss_scale=64.0
    )
    plain = torch.optim.LBFGS(reference.parameters(), **options)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        calls.append(loss.item())
        optimizer.backward(loss)
        return loss

    def plain_closure() -> torch.Tensor:
        plain.zero_grad()
        loss = loss_of(reference, 0)
        loss.backward()
        return loss

    for _ in range(3):
        loss = optimizer.step(closure)
        want = plain.step(plain_closure)
        torch.testing.assert_close(loss, want, rtol=1e-2, atol=1e-3)
    assert len(calls) > 3 and calls[-1] < calls[0]
    assert optimizer.first_closure_call_this_step


def test_closure_that_overflows_is_evaluated_again_but_not_forever() -> None:
    model = net()
    optimizer = wrap(model, dynamic_loss_scale=True, verbose=False)
    bad = [True, True, False]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        optimizer.backward(loss, update_master_grads=False)
        if bad.pop(0):
            model[0].weight.grad[0, 0] = float("inf")
        optimizer.update_master_grads()
        return loss

    optimizer.step(closure)
    assert not bad and optimizer.loss_scale == 2.0**14
    bad = [True] * 200
    with pytest.raises(RuntimeError, match="in a row"):
        optimizer.step(closure)


def test_load_state_dict_of_another_model_or_of_apex() -> None:
    model = net()
    optimizer = wrap(model, dynamic_loss_scale=True)
    other = nn.Linear(3, 3).half()
    foreign = FP16_Optimizer(torch.optim.SGD(other.parameters(), lr=0.1)).state_dict()
    with pytest.raises(ValueError, match="2 master weights"):
        optimizer.load_state_dict(foreign)

    # Apex saved the scaler object itself in the state.
    scaler = LossScaler("dynamic")
    scaler._loss_scale, scaler._unskipped = 32.0, 5
    state = optimizer.state_dict()
    assert sorted(state) == [
        "dynamic_loss_scale", "first_closure_call_this_step", "fp32_from_fp16", "loss_scaler",
        "optimizer_state_dict", "overflow",
    ]  # fmt: skip
    state["loss_scaler"] = pickle.loads(pickle.dumps(scaler))
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 32.0 and optimizer.loss_scaler._unskipped == 5


def test_pickling_raises_and_attributes_are_those_of_the_inner_optimizer() -> None:
    model = net()
    optimizer = wrap(model)
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(optimizer)
    inner = optimizer.optimizer
    assert optimizer.state is inner.state and optimizer.param_groups is inner.param_groups
    optimizer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("clean", [0, 7, 1000, 1003])
def test_state_with_a_pickled_dynamic_loss_scaler_of_old_apex_loads(clean: int) -> None:
    scaler = fp16_utils.DynamicLossScaler(init_scale=2.0**10, scale_window=1000)
    scaler.update_scale(True)
    for _ in range(clean):
        scaler.update_scale(False)
    model = nn.Linear(3, 2).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
    state = optimizer.state_dict()
    state["loss_scaler"] = pickle.loads(pickle.dumps(scaler))
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == scaler.loss_scale == 2.0 ** (9 + clean // 1000)
    assert optimizer.loss_scaler._unskipped == clean % 1000
    state["loss_scaler"] = pickle.loads(pickle.dumps(fp16_utils.LossScaler(64.0)))
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 64.0


def test_frozen_parameters_get_no_master() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = wrap(model)
    assert len(optimizer.all_fp32_from_fp16_params) == 5
    optimizer.backward(loss_of(model, 0))
    optimizer.step()


CHANGES = {
    "static 1": {},
    "static 128": OPTIONS["static 128"],
    "the scale grows": {
        "dynamic_loss_scale": True,
        "dynamic_loss_args": {"init_scale": 4.0, "scale_window": 1, "max_loss_scale": 2.0**10},
    },
}


@pytest.mark.parametrize("clear", ["zeros", "None", "model"])
@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, F32])
def test_backward_several_times_adds_gradients_up_as_float32(
    dtype: torch.dtype, name: str, update: bool, clear: str
) -> None:
    model, reference = net(dtype), net(None)
    model[1].float()  # a float32 layer, for any dtype of the others
    model[1].forward = lambda x, f=model[1].forward: f(x.float()).to(dtype)
    optimizer = FP16_Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), **CHANGES[name]
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.02, momentum=0.9)
    for step in range(4):
        for part in range(3):
            optimizer.backward(loss_of(model, 3 * step + part), update_master_grads=update)
            if part == 1 and not update and "static" in name:
                optimizer.loss_scale = 32.0 * (step + 1)
            loss_of(reference, 3 * step + part).backward()
        if step == 2 or not update:
            optimizer.update_master_grads()
        optimizer.step()
        plain.step()
        plain.zero_grad()
        if clear == "model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_grads_to_None=clear == "None")
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    tolerance = {HALF: 4e-3, torch.bfloat16: 4e-2, F32: 1e-5}[dtype]
    for master, want in zip(masters, reference.parameters(), strict=True):
        torch.testing.assert_close(master, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("to_none", [False, True])
def test_sparse_gradients_of_an_embedding_are_unscaled(to_none: bool) -> None:
    model = nn.Embedding(5, 2, sparse=True).half()
    before = model.weight.detach().clone()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.5), static_loss_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad(to_none)
        optimizer.backward(model(torch.tensor([1, 1, 3])).float().sum())
        assert optimizer.inspect_master_grad_data()[0][0].is_sparse
        optimizer.step()
    moved = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0])[:, None].expand(5, 2)
    torch.testing.assert_close(before - model.weight, moved.half(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", OPTIONS)
def test_script_that_scales_the_loss_and_clears_the_model_trains_as_backward_does(
    name: str,
) -> None:
    """Hazard: gradients of the next iteration are taken for those that were unscaled."""
    results = []
    for own in (True, False):
        model = net()
        optimizer = wrap(model, **OPTIONS[name])
        for step in range(5):
            model.zero_grad()
            if own:
                (loss_of(model, step) * optimizer.loss_scale).backward()
                optimizer.update_master_grads()
            else:
                optimizer.backward(loss_of(model, step))
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))
