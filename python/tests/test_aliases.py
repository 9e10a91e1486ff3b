# SPDX-License-Identifier: BSD-3-Clause
"""The thin aliases of torch's own implementations."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from torch import nn

from apex import normalization, optimizers
from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier


def params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]


def train(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    members = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(3):
        optimizer.zero_grad()
        sum((p - 1).pow(2).sum() for p in members).backward()
        optimizer.step()
    return [p.detach() for p in members]


@pytest.mark.parametrize(
    "alias, plain",
    [
        (
            lambda p: optimizers.FusedAdam(p, lr=0.1, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        ),
        (
            lambda p: optimizers.FusedAdam(iter(p), adam_w_mode=False, weight_decay=0.1),
            lambda p: torch.optim.Adam(p, weight_decay=0.1),
        ),
        (
            lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        ),
        (
            lambda p: optimizers.FusedSGD([{"params": iter(p), "lr": 0.2}], 0.1, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, lr=0.2, weight_decay=0.1),
        ),
    ],
)
def test_fused_optimizer_steps_as_torchs(alias: object, plain: object) -> None:
    optimizer = alias(params())
    assert isinstance(optimizer, torch.optim.Optimizer)
    for a, b in zip(train(optimizer), train(plain(params())), strict=True):
        torch.testing.assert_close(a, b)


def _apexs(state: dict, name: str) -> dict:
    """`state` in the layout of Apex's class: only its settings, and the step in the group."""
    state = copy.deepcopy(state)
    kept = {
        "FusedAdam": ("params", "lr", "betas", "eps", "weight_decay"),
        "FusedSGD": ("params", "lr", "momentum", "dampening", "weight_decay", "nesterov"),
    }[name]
    for group in state["param_groups"]:
        for key in set(group) - set(kept):
            del group[key]
        if name == "FusedAdam":
            group["bias_correction"] = True
            group["step"] = 3
    if name == "FusedAdam":
        for entry in state["state"].values():
            del entry["step"]
    return state


@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
def test_fused_optimizer_loads_the_state_of_apexs_class(name: str) -> None:
    options = {"FusedAdam": {"weight_decay": 0.1}, "FusedSGD": {"momentum": 0.9}}[name]
    first, mine, want = (getattr(optimizers, name)(params(), lr=0.1, **options) for _ in range(3))
    train(first)
    state = first.state_dict()
    want.load_state_dict(copy.deepcopy(state))
    mine.load_state_dict(_apexs(state, name))
    assert all(map(torch.equal, train(mine), train(want)))
    with pytest.raises(ValueError, match="param"):
        mine.load_state_dict({"state": {}, "param_groups": 2 * state["param_groups"]})


@pytest.mark.parametrize(
    "make, error, match",
    [
        (lambda: optimizers.FusedAdam(params(), amsgrad=True), ValueError, "AMSGrad"),
        (lambda: optimizers.FusedSGD(params(), wd_after_momentum=True), ValueError, "momentum"),
    ],
)
def test_unavailable_optimizer_or_setting_names_the_alternative(
    make: object, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    "name, plain",
    [
        ("FusedLayerNorm", nn.LayerNorm),
        ("FusedRMSNorm", nn.RMSNorm),
        ("MixedFusedLayerNorm", nn.LayerNorm),
        ("MixedFusedRMSNorm", nn.RMSNorm),
    ],
)
def test_normalization_is_torchs(name: str, plain: type[nn.Module]) -> None:
    module = importlib.import_module("apex.normalization.fused_layer_norm")
    alias = getattr(normalization, name)
    assert getattr(module, name) is alias and issubclass(alias, plain)
    mine, reference = alias(4, eps=1e-3), plain(4, eps=1e-3)
    with torch.no_grad():
        mine.weight.copy_(torch.rand(4))
    reference.load_state_dict(mine.state_dict())
    x = torch.rand(2, 3, 4)
    assert torch.equal(mine(x), reference(x))
    if name.startswith("Mixed"):
        assert mine(x.half()).dtype == torch.float32
        assert alias(4).half()(x).dtype == torch.float16
        with pytest.raises(ValueError, match="elementwise_affine"):
            alias(4, elementwise_affine=False)
    else:
        assert not list(alias((3, 4), elementwise_affine=False).parameters())
        assert alias((3, 4), memory_efficient=True)(x).shape == x.shape


def test_multi_tensor_applier_calls_the_operation() -> None:
    assert isinstance(multi_tensor_applier, MultiTensorApply)
    assert multi_tensor_applier.available is False
    seen = multi_tensor_applier(lambda *args: args, "flag", [["x"]], 1, 2)
    assert seen == (2048 * 32, "flag", [["x"]], 1, 2)
