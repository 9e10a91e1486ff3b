# SPDX-License-Identifier: BSD-3-Clause
"""apex.normalization's functions against torch's in float64."""

from __future__ import annotations

import pytest
import torch
from amp_support import fresh_amp  # noqa: F401
from torch import Tensor, nn

from apex import normalization
from apex.normalization import fused_layer_norm as module

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPE = (3, 4)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return torch.nn.functional.layer_norm(x, SHAPE, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, SHAPE, weight, eps)


def inputs(dtype: torch.dtype, weight_dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(5, *SHAPE, dtype=torch.float64).to(dtype)
    weight, bias = torch.rand(2, *SHAPE, dtype=torch.float64).to(weight_dtype)
    return [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias)]


CASES = {
    "fused_layer_norm_affine": (3, layer_norm),
    "fused_layer_norm": (1, lambda x, eps: layer_norm(x, None, None, eps)),
    "mixed_dtype_fused_layer_norm_affine": (3, layer_norm),
    "fused_rms_norm_affine": (2, rms_norm),
    "fused_rms_norm": (1, lambda x, eps: rms_norm(x, None, eps)),
    "mixed_dtype_fused_rms_norm_affine": (2, rms_norm),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("eps", [None, 0.1])
def test_function_value_and_gradients_are_those_of_float64(
    dtype: torch.dtype, mixed: bool, name: str, eps: float | None
) -> None:
    count, reference = CASES[name]
    weight_dtype = torch.float32 if mixed else dtype
    given = inputs(dtype, weight_dtype)[:count]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    options = {} if eps is None else {"eps": eps}
    result = getattr(module, name)(*given, SHAPE, **options)
    expected = reference(*wide, 1e-6 if eps is None else eps)
    assert result.dtype == (weight_dtype if name.startswith("mixed") else dtype)
    direction = torch.randn(result.shape, dtype=torch.float64)
    result.backward(direction.to(result.dtype))
    expected.backward(direction)
    limit = max(DTYPES[tensor.dtype] for tensor in given) * (4 if dtype.itemsize == 2 else 1)
    for mine, want in [(result, expected)] + [
        (g.grad, w.grad) for g, w in zip(given, wide, strict=True)
    ]:
        scale = want.abs().max().item()
        torch.testing.assert_close(mine.double(), want, rtol=0, atol=limit * max(1.0, scale))
    for tensor in given:
        assert tensor.grad.dtype == tensor.dtype


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_mixed_variants_round_the_result_and_not_the_input(
    weight_dtype: torch.dtype, autocast: bool
) -> None:
    torch.manual_seed(0)
    for values in (torch.randn(5, *SHAPE) * 1e5, 1000 + torch.randn(5, *SHAPE)):
        for kind, reference in (("Layer", layer_norm), ("RMS", rms_norm)):
            x = values.clone().requires_grad_()
            norm = getattr(module, f"MixedFused{kind}Norm")(SHAPE, eps=1e-5).to(weight_dtype)
            wide = x.detach().double().requires_grad_()
            affine = [param.detach().double() for param in norm.parameters()]
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                result = norm(x)
            expected = reference(wide, *affine, 1e-5)
            assert result.dtype == weight_dtype
            assert torch.allclose(
                result.double(), expected, rtol=DTYPES[weight_dtype] / 4, atol=1e-3
            )
            direction = torch.randn(5, *SHAPE, dtype=torch.float64).to(weight_dtype)
            result.backward(direction)
            expected.backward(direction.double())
            assert x.grad.dtype == torch.float32 and norm.weight.grad.dtype == weight_dtype
            torch.testing.assert_close(
                x.grad.double(), wide.grad, rtol=1e-3, atol=1e-3 * wide.grad.abs().max().item()
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.float16], ids=str)
def test_manual_rms_norm_computes_in_float32_and_follows_the_weight(
    dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    x, weight, _ = inputs(dtype, weight_dtype or torch.float32)
    result = module.manual_rms_norm(x, SHAPE, None if weight_dtype is None else weight, 1e-3)
    expected = rms_norm(x.double(), None if weight_dtype is None else weight.double(), 1e-3)
    wide = torch.promote_types(dtype, torch.float32)
    assert result.dtype == (torch.float16 if weight_dtype == torch.float16 else wide)
    limit = 2e-3 if weight_dtype == torch.float16 else 1e-6
    torch.testing.assert_close(result.double(), expected, rtol=limit, atol=limit)


def test_functions_take_one_size_and_ignore_memory_efficient() -> None:
    x, weight, bias = torch.randn(2, 4), torch.rand(4), torch.rand(4)
    same = torch.nn.functional.layer_norm(x, (4,), weight, bias, 1e-6)
    assert torch.equal(module.fused_layer_norm_affine(x, weight, bias, 4, 1e-6, True), same)
    same = torch.nn.functional.rms_norm(x, (4,), weight, 1e-6)
    assert torch.equal(module.fused_rms_norm_affine(x, weight, [4], memory_efficient=True), same)


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
