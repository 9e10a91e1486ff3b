# SPDX-License-Identifier: BSD-3-Clause
"""apex.fp16_utils: casting networks, parameter lists, the scalers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from apex import fp16_utils
from apex.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)

HALF, F32 = torch.float16, torch.float32


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)
    )
    model[0].register_buffer("count", torch.arange(3))
    model[0].register_buffer("scale", torch.ones(2))
    return model


def test_exports_are_those_scripts_import_with_a_star() -> None:
    names: dict[str, object] = {}
    exec("from apex.fp16_utils import *", names)
    expected = set(
        "BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads "
        "master_params_to_model_params tofp16 to_python_float clip_grad_norm convert_module "
        "convert_network FP16Model FP16_Optimizer LossScaler DynamicLossScaler".split()
    )
    assert expected == set(fp16_utils.__all__) and expected <= set(names)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_convert_network_casts_all_but_affine_batch_norm(dtype: torch.dtype) -> None:
    model = net()
    before = [id(param) for param in model.parameters()]
    model(torch.rand(3, 4)).sum().backward()
    assert convert_network(model, dtype) is model
    assert [id(param) for param in model.parameters()] == before
    assert model[0].weight.dtype == model[0].weight.grad.dtype == model[0].scale.dtype == dtype
    assert model[0].count.dtype == torch.int64
    assert model[1].weight.dtype == model[1].running_mean.dtype == F32
    assert model[2].running_mean.dtype == dtype
    assert model[2].num_batches_tracked.dtype == torch.int64


class Counts(nn.Module):
    def __init__(self, seen: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x


def test_convert_network_shared_buffer_stays_shared() -> None:
    seen = torch.zeros(2)
    network = convert_network(nn.Sequential(Counts(seen), Counts(seen)), HALF)
    network(torch.ones(1))
    assert seen.dtype == HALF and seen.tolist() == [2.0, 2.0]
    assert network[0].seen is seen and network[1].seen is seen


def test_convert_module_leaves_children_alone() -> None:
    parent = nn.Module()
    parent.weight = nn.Parameter(torch.ones(2))
    parent.child = nn.Linear(2, 2)
    convert_module(parent, HALF)
    assert parent.weight.dtype == HALF and parent.child.weight.dtype == F32


def test_convert_network_recurrent_module_still_runs() -> None:
    lstm = convert_network(nn.LSTM(4, 4), torch.bfloat16)
    assert lstm(torch.rand(2, 3, 4).bfloat16())[0].dtype == torch.bfloat16


def test_bn_convert_float_and_network_to_half() -> None:
    model = network_to_half(net())
    assert isinstance(model[0], tofp16) and model[1][0].weight.dtype == HALF
    assert model[1][1].weight.dtype == F32 and model[1][2].running_mean.dtype == HALF
    assert model(torch.rand(3, 4)).dtype == HALF
    halved = net().half()
    assert BN_convert_float(halved) is halved and halved[1].weight.dtype == F32
    assert halved[2].running_mean.dtype == HALF


def test_fp16_model_casts_every_positional_input() -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            assert x.dtype == y.dtype == self.weight.dtype == HALF
            return x + y + self.weight

    model = FP16Model(Add())
    assert isinstance(model.network, Add)
    assert model(torch.ones(2), torch.ones(2, dtype=torch.int64)).dtype == HALF


def test_tofp16_casts_its_input() -> None:
    assert tofp16()(torch.ones(2)).dtype == HALF


@pytest.mark.parametrize("flat", [False, True])
def test_master_params_training_matches_float32(flat: bool) -> None:
    model, reference = net().half(), net()
    model[1].float()
    reference.load_state_dict(model.state_dict())
    model[3].bias.requires_grad_(False)
    reference[3].bias.requires_grad_(False)
    params, masters = prep_param_lists(model, flat_master=flat)
    assert len(params) == 5 and len(masters) == (1 if flat else 5)
    assert all(master.dtype == F32 and master.requires_grad for master in masters)
    if flat:
        assert masters[0].grad is not None and masters[0].dim() == 1
    optimizer = torch.optim.SGD(masters, lr=0.1)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        x = torch.rand(4, 4, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        hidden = model[2](model[1](model[0](x.half()).float()).half())
        (model[3](hidden).float().pow(2).mean() * 8).backward()
        model_grads_to_master_grads(params, masters, flat_master=flat)
        for master in masters:
            master.grad.div_(8)
        optimizer.step()
        master_params_to_model_params(params, masters, flat_master=flat)
        reference_optimizer.zero_grad()
        reference(x).pow(2).mean().backward()
        reference_optimizer.step()
    for mine, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.float(), want, rtol=2e-2, atol=5e-3)


def test_model_grads_to_master_grads_none_gives_none_or_zero() -> None:
    model = nn.Linear(2, 2).half()
    model.weight.grad = torch.ones(2, 2, dtype=HALF)
    params, masters = prep_param_lists(model)
    masters[1].grad = torch.ones(2)
    model_grads_to_master_grads(params, masters)
    assert torch.equal(masters[0].grad, torch.ones(2, 2)) and masters[1].grad is None
    params, masters = prep_param_lists(model, flat_master=True)
    masters[0].grad.fill_(9)
    model_grads_to_master_grads(params, masters, flat_master=True)
    assert masters[0].grad.tolist() == [1.0] * 4 + [0.0] * 2
    with pytest.raises(ValueError, match="no parameter"):
        prep_param_lists(nn.ReLU(), flat_master=True)


def test_to_python_float_and_clip_grad_norm() -> None:
    assert to_python_float(torch.tensor([2.5])) == 2.5
    assert to_python_float([3.5]) == 3.5 and to_python_float(np.float32(1.5)) == 1.5
    param = nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    assert clip_grad_norm([param], 1.0) == 2 and param.grad.norm() == pytest.approx(1.0)


def test_static_scaler_scales_and_never_reacts() -> None:
    scaler = LossScaler(4)
    param = nn.Parameter(torch.ones(2))
    scaler.backward(param.sum())
    assert param.grad.tolist() == [4.0, 4.0]
    param.grad[0] = float("inf")
    assert scaler.has_overflow([param]) is False
    scaler.update_scale(True)
    assert scaler.loss_scale == 4
    assert scaler.scale_gradient(None, (torch.ones(1), None), None) == (torch.tensor([4.0]), None)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [F32, HALF, torch.bfloat16])
def test_dynamic_scaler_sees_every_kind_of_overflow(dtype: torch.dtype, bad: float) -> None:
    scaler = DynamicLossScaler()
    clean, dirty = (nn.Parameter(torch.ones(100, dtype=dtype)) for _ in range(2))
    assert scaler.has_overflow([clean, dirty]) is False, "no gradients at all"
    for param in (clean, dirty):
        param.grad = torch.full_like(param, 60000.0)
    assert scaler.has_overflow([clean, dirty]) is False
    dirty.grad[99] = bad
    assert scaler.has_overflow(iter([clean, dirty])) is True


def test_dynamic_scaler_follows_the_documented_policy() -> None:
    scaler = DynamicLossScaler(init_scale=64, scale_window=3)
    history = []
    for overflow in (False, False, False, False, True, False, False, False, False, False, False):
        scaler.update_scale(overflow)
        history.append(scaler.loss_scale)
    assert history == [64, 64, 128, 128, 64, 64, 64, 128, 128, 128, 256]
    assert DynamicLossScaler().loss_scale == 2**32
    scaler = DynamicLossScaler(init_scale=2)
    for _ in range(3):
        scaler.update_scale(True)
    assert scaler.loss_scale == 1
