# SPDX-License-Identifier: BSD-3-Clause
"""Layer normalization and root-mean-square normalization."""

from __future__ import annotations

from typing import Any

import torch

from ._functions import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    FusedRMSNormFunction,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)

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


class FusedLayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm``. Input ``[*, *normalized_shape]``, output of the same shape.

    Args:
        normalized_shape, eps, elementwise_affine: as in torch.
        memory_efficient: accepted and ignored.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        del memory_efficient
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)


class FusedRMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm``. Input ``[*, *normalized_shape]``, output of the same shape.

    Args:
        normalized_shape, eps, elementwise_affine: as in torch.
        memory_efficient: accepted and ignored.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        del memory_efficient
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)


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

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize `input` in its dtype or the weight's, whichever is wider."""
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps
        )


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """:class:`FusedRMSNorm` whose output has the dtype of its weight, for any input dtype."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize `input` in its dtype or the weight's, whichever is wider."""
        return mixed_dtype_fused_rms_norm_affine(
            input, self.weight, self.normalized_shape, self.eps
        )
