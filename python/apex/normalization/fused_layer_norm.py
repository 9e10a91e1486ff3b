# SPDX-License-Identifier: BSD-3-Clause
"""Apex's fused normalizations, implemented with torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


def _shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(normalized_shape, int):
        return (normalized_shape,)
    return tuple(normalized_shape)


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _wider(input: Tensor, weight: Tensor) -> Tensor:
    return input.to(torch.promote_types(input.dtype, weight.dtype))


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
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
    return fused_layer_norm_affine(input, None, None, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """:func:`fused_layer_norm_affine` with a result in the dtype of `weight`.

    It is computed in the wider dtype of `input` and `weight`, and rounded once.
    """
    result = fused_layer_norm_affine(
        _wider(input, weight), weight, bias, normalized_shape, eps, memory_efficient
    )
    return result.to(weight.dtype)


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: int | Sequence[int],
    eps: float | None = 1e-6,
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
    eps: float | None = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """:func:`fused_rms_norm_affine` without a weight."""
    return fused_rms_norm_affine(input, None, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: int | Sequence[int],
    eps: float | None = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """:func:`fused_rms_norm_affine` with a result in the dtype of `weight`.

    It is computed in the wider dtype of `input` and `weight`, and rounded once.
    """
    result = fused_rms_norm_affine(
        _wider(input, weight), weight, normalized_shape, eps, memory_efficient
    )
    return result.to(weight.dtype)


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


def _with_apply(name: str, function: Callable[..., Tensor]) -> Any:
    """A class for code that calls the ``apply`` of Apex's autograd function of this name."""
    return type(name, (), {"apply": staticmethod(function), "__doc__": "Not an autograd function."})


FusedLayerNormAffineFunction = _with_apply("FusedLayerNormAffineFunction", fused_layer_norm_affine)
FusedLayerNormAffineMixedDtypesFunction = _with_apply(
    "FusedLayerNormAffineMixedDtypesFunction", mixed_dtype_fused_layer_norm_affine
)
FusedLayerNormFunction = _with_apply("FusedLayerNormFunction", fused_layer_norm)
FusedRMSNormAffineFunction = _with_apply("FusedRMSNormAffineFunction", fused_rms_norm_affine)
FusedRMSNormAffineMixedDtypesFunction = _with_apply(
    "FusedRMSNormAffineMixedDtypesFunction", mixed_dtype_fused_rms_norm_affine
)
FusedRMSNormFunction = _with_apply("FusedRMSNormFunction", fused_rms_norm)


class _TakesMemoryEfficient(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        del memory_efficient
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)


class FusedLayerNorm(_TakesMemoryEfficient, torch.nn.LayerNorm):
    """``torch.nn.LayerNorm``. Input ``[*, *normalized_shape]``, output of the same shape.

    Args:
        normalized_shape, eps, elementwise_affine: as in torch.
        memory_efficient: accepted and ignored.
    """


class FusedRMSNorm(_TakesMemoryEfficient, torch.nn.RMSNorm):
    """``torch.nn.RMSNorm``, with the arguments of :class:`FusedLayerNorm`."""


class _Mixed(torch.nn.Module):
    def __init__(
        self, normalized_shape: int | list[int] | torch.Size, eps: float = 1e-5, **kwargs: Any
    ) -> None:
        if not kwargs.pop("elementwise_affine", True):
            raise ValueError(
                "The mixed variants return the dtype of their weight, so elementwise_affine must "
                "be True; without a weight use FusedLayerNorm or FusedRMSNorm."
            )
        super().__init__(normalized_shape, eps=eps, **kwargs)


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """:class:`FusedLayerNorm` whose output has the dtype of its weight, for any input dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input` in its dtype or the weight's, whichever is wider."""
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps
        )


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """:class:`FusedRMSNorm` whose output has the dtype of its weight, for any input dtype."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input` in its dtype or the weight's, whichever is wider."""
        return mixed_dtype_fused_rms_norm_affine(
            input, self.weight, self.normalized_shape, self.eps
        )
