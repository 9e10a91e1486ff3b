# SPDX-License-Identifier: BSD-3-Clause
"""The functions of Apex's fused normalizations, implemented with torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def _shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(normalized_shape, int):
        return (normalized_shape,)
    return tuple(normalized_shape)


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """``torch.nn.functional.layer_norm`` of `input`, ``[*, *normalized_shape]``.

    The result has the shape and dtype of `input`, unless apex.amp's level O1 or torch.autocast
    casts it. `weight` and `bias`, ``[*normalized_shape]``, may have another dtype.
    `memory_efficient` is ignored.
    """
    del memory_efficient
    dtype = input.dtype
    return functional.layer_norm(
        input, _shape(normalized_shape), _as(weight, dtype), _as(bias, dtype), eps
    )


def fused_layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """:func:`fused_layer_norm_affine` without weight and bias."""
    del memory_efficient
    return functional.layer_norm(input, _shape(normalized_shape), None, None, eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """:func:`fused_layer_norm_affine` with a result in the dtype of `weight`."""
    return fused_layer_norm_affine(
        input.to(weight.dtype), weight, bias, normalized_shape, eps, memory_efficient
    )


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """``torch.nn.functional.rms_norm`` of `input`, ``[*, *normalized_shape]``.

    The result has the shape and dtype of `input`. `weight`, ``[*normalized_shape]``, may have
    another dtype. `memory_efficient` is ignored.
    """
    del memory_efficient
    return functional.rms_norm(input, _shape(normalized_shape), _as(weight, input.dtype), eps)


def fused_rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """:func:`fused_rms_norm_affine` without a weight."""
    del memory_efficient
    return functional.rms_norm(input, _shape(normalized_shape), None, eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """:func:`fused_rms_norm_affine` with a result in the dtype of `weight`."""
    return fused_rms_norm_affine(
        input.to(weight.dtype), weight, normalized_shape, eps, memory_efficient
    )


def manual_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float
) -> Tensor:
    """Root-mean-square normalization by elementary operators, in float32 at least.

    The result has the dtype of `weight` if that is a low-precision dtype. Otherwise it is float32
    or wider.
    """
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    dims = tuple(range(-len(_shape(normalized_shape)), 0))
    normalized = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    if weight is None:
        return normalized
    if weight.dtype in (torch.float16, torch.bfloat16):
        normalized = normalized.to(weight.dtype)
    return weight * normalized


class FusedLayerNormAffineFunction:
    """For code that calls ``FusedLayerNormAffineFunction.apply``. Not an autograd function."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormAffineMixedDtypesFunction:
    """For code that calls its ``apply``. Not an autograd function."""

    apply = staticmethod(mixed_dtype_fused_layer_norm_affine)


class FusedLayerNormFunction:
    """For code that calls its ``apply``. Not an autograd function."""

    apply = staticmethod(fused_layer_norm)


class FusedRMSNormAffineFunction:
    """For code that calls its ``apply``. Not an autograd function."""

    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormAffineMixedDtypesFunction:
    """For code that calls its ``apply``. Not an autograd function."""

    apply = staticmethod(mixed_dtype_fused_rms_norm_affine)


class FusedRMSNormFunction:
    """For code that calls its ``apply``. Not an autograd function."""

    apply = staticmethod(fused_rms_norm)
