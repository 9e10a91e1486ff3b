# SPDX-License-Identifier: BSD-3-Clause
"""The state of FusedAdam and FusedSGD: float32 moments, and the effects of loading one. (Skipped
steps: amp_programs.py.)"""

from __future__ import annotations

import copy
from typing import Any

import fused_optimizer_references as references
import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from torch import Tensor, nn

from apex.optimizers import FusedAdam, FusedSGD

# --- float32 moments of low-precision parameters ---


def _sliced(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., : shape[-1]])


def _spacing(values: Tensor) -> Tensor:
    """The distance between neighbors of each of `values` in their dtype."""
    exponents = torch.frexp(values.double()).exponent - 1
    return torch.ldexp(torch.full_like(values, torch.finfo(values.dtype).eps).double(), exponents)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("size", [1e-4, 1.0])
def test_fused_adam_of_low_precision_keeps_float32_moments_and_rounds_once(
    dtype: torch.dtype, decoupled: bool, correction: bool, size: float
) -> None:
    """From the parameters before each step, float64 computes the value that is rounded."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n).to(dtype)) for n in (3, 64, 67)]
    params += [_sliced((5, 3), dtype), nn.Parameter(torch.randn(4, 3).to(dtype).t())]
    options = {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": decoupled}
    optimizer = FusedAdam(params, bias_correction=correction, **options)
    reference = references.Adam(bias_correction=correction, **options)
    for _ in range(5):
        exact = [p.detach().double().numpy().copy() for p in params]
        for param in params:
            param.grad = (size * torch.randn(param.shape)).to(dtype)
        reference.step(exact, [p.grad.double().numpy() for p in params])
        optimizer.step()
        for index, (param, value) in enumerate(zip(params, exact, strict=True)):
            now = param.detach()
            error = (now.double() - torch.from_numpy(value)).abs()
            assert (error <= 0.51 * _spacing(now) + 1e-7).all()
            state = optimizer.state[param]
            for name, wanted in (("exp_avg", reference.m), ("exp_avg_sq", reference.v)):
                assert state[name].dtype == torch.float32 and state[name].is_contiguous() == (
                    index != 4
                )
                torch.testing.assert_close(
                    state[name].double(), torch.from_numpy(wanted[index]), rtol=1e-4, atol=1e-14
                )


def _trained(kind: Any, dtype: torch.dtype, **options: Any) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(5).to(dtype)), _sliced((3, 2), dtype)]
    optimizer = kind(params, **options)
    for _ in range(2):
        for param in params:
            param.grad = (1e-4 * torch.randn(param.shape)).to(dtype)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_apex", [False, True])
def test_fused_adam_loads_float32_moments_without_rounding(
    dtype: torch.dtype, of_apex: bool
) -> None:
    params, optimizer = _trained(FusedAdam, dtype)
    state = copy.deepcopy(optimizer.state_dict())
    if of_apex:
        for group in state["param_groups"]:
            for key in set(group) - {
                *("params", "lr", "betas", "eps", "weight_decay", "bias_correction", "step")
            }:
                del group[key]
        for entry in state["state"].values():
            del entry["step"]
    others = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = FusedAdam(others)
    resumed.load_state_dict(state)
    for one, other in zip(params, others, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            mine, saved = resumed.state[other][name], optimizer.state[one][name]
            assert mine.dtype == torch.float32 and torch.equal(mine, saved)
        assert resumed.state[other]["step"].dtype == torch.float32
        assert float(resumed.state[other]["step"]) == 2
        one.grad = other.grad = (1e-4 * torch.randn(one.shape)).to(dtype)
    optimizer.step()
    resumed.step()
    assert all(map(torch.equal, params, others))


def test_fused_sgd_of_float16_rounds_parameter_and_momentum_once() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(67).half()), _sliced((5, 3), torch.float16)]
    optimizer = FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    for _ in range(4):
        before = [
            (p.detach().double(), optimizer.state.get(p, {}).get("momentum_buffer")) for p in params
        ]
        before = [(p, None if m is None else m.double()) for p, m in before]
        for param in params:
            param.grad = torch.randn(param.shape).half()
        optimizer.step()
        for param, (old, momentum) in zip(params, before, strict=True):
            grad = param.grad.double() + 0.1 * old
            momentum = grad if momentum is None else 0.9 * momentum + grad
            wanted = old - 0.1 * (grad + 0.9 * momentum)
            now, kept = param.detach(), optimizer.state[param]["momentum_buffer"]
            assert ((now.double() - wanted).abs() <= 0.51 * _spacing(now)).all()
            assert kept.dtype == torch.float32
            torch.testing.assert_close(kept.double(), momentum, rtol=1e-6, atol=1e-6)


# --- the effects of a loaded state ---


SAVED: Any = {"lr": 0.3, "betas": (0.5, 0.6), "eps": 0.2, "weight_decay": 0.4}
OTHERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, **SAVED),
    "Adam": lambda p: torch.optim.Adam(p, **SAVED),
    "amsgrad": lambda p: torch.optim.AdamW(p, **SAVED, amsgrad=True),
    "maximize": lambda p: torch.optim.Adam(p, **SAVED, maximize=True, foreach=True),
    "FusedAdam": lambda p: FusedAdam(p, **SAVED, adam_w_mode=False, capturable=True),
}


@pytest.mark.parametrize("source", OTHERS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_fused_adam_loaded_state_changes_numbers_and_not_what_is_computed(
    source: str, decoupled: bool
) -> None:
    torch.manual_seed(0)
    saved = nn.Parameter(torch.randn(5))
    other = OTHERS[source]([saved])
    for _ in range(2):
        saved.grad = torch.randn(5)
        other.step()
    param = nn.Parameter(saved.detach().clone())
    optimizer = FusedAdam([param], lr=1e-3, adam_w_mode=decoupled)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    assert optimizer.adam_w_mode == decoupled
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"], group["step"]) == (
        *(0.3, (0.5, 0.6), 0.2, 0.4, 2),
    )
    assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}
    # One more step of the constructor's algorithm, from the loaded moments.
    wanted = references.Adam(**SAVED, adam_w_mode=decoupled)
    wanted.t = 2
    wanted.m[0] = other.state[saved]["exp_avg"].double().numpy()
    wanted.v[0] = other.state[saved]["exp_avg_sq"].double().numpy()
    arrays = [param.detach().double().numpy().copy()]
    param.grad = torch.randn(5)
    wanted.step(arrays, [param.grad.double().numpy()])
    optimizer.step()
    torch.testing.assert_close(
        param.detach().double(), torch.from_numpy(arrays[0]), rtol=1e-5, atol=1e-6
    )


def test_fused_adam_loads_the_step_of_apexs_capturable_class() -> None:
    params, optimizer = _trained(FusedAdam, torch.float32)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["step"] = torch.tensor([2], dtype=torch.int)
    for entry in state["state"].values():
        del entry["step"]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["step"] == 2
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {2.0}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fused_adam_with_master_weights_does_not_lose_small_steps(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = FusedAdam([param], lr=1e-4, master_weights=True)
    for step in range(200):
        if step == 100:  # resumed
            saved = copy.deepcopy((param.detach(), optimizer.state_dict()))
            param = nn.Parameter(saved[0])
            optimizer = FusedAdam([param], lr=1e-4, master_weights=True)
            optimizer.load_state_dict(saved[1])
        param.grad = torch.ones_like(param)
        optimizer.step()
    master = optimizer.state[param]["master_param"]
    torch.testing.assert_close(master, torch.full((3,), 0.98), rtol=0, atol=1e-5)
    assert torch.equal(param.detach(), master.to(dtype))
    with torch.no_grad():
        param[0] = 2.0
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert param[0] > 1.9, "a written parameter was overwritten"


def test_fused_adam_group_with_amsgrad_is_refused() -> None:
    optimizer = FusedAdam([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="FusedAdam has no AMSGrad variant"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "amsgrad": True})
    assert len(optimizer.param_groups) == 1


def test_fused_sgd_loads_the_state_of_apexs_class() -> None:
    """Apex's groups have its own settings only, and may come from iterators."""

    def made() -> tuple[nn.Parameter, FusedSGD]:
        param = nn.Parameter(torch.ones(3))
        group = {"params": iter([param]), "weight_decay": 0.1}
        return param, FusedSGD([group], 0.1, momentum=0.9, nesterov=True)

    (first, saved), (second, resumed) = made(), made()
    first.grad = torch.ones(3)
    saved.step()
    state = copy.deepcopy(saved.state_dict())
    kept = ("params", "lr", "momentum", "dampening", "weight_decay", "nesterov")
    state["param_groups"] = [{key: g[key] for key in kept} for g in state["param_groups"]]
    resumed.load_state_dict(state)
    second.data.copy_(first)
    first.grad = second.grad = torch.ones(3)
    saved.step()
    resumed.step()
    assert torch.equal(first, second)
    with pytest.raises(ValueError, match="param"):
        resumed.load_state_dict({"state": {}, "param_groups": 2 * state["param_groups"]})
