# SPDX-License-Identifier: BSD-3-Clause
"""Norms of the processes' gradients, and how much they differ."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from apex import _core


@dataclass(frozen=True)
class ParameterNorms:
    """Euclidean norms of one parameter's gradient.

    Attributes:
        name: as in ``named_parameters()`` of the wrapped module.
        bucket: the bucket's index in launch order; None if the gradient was reduced outside of the
            plan, or not at all.
        norm: of the gradient after backward; NaN if the step was skipped.
        own: of this process's gradient before the average, without its weight.
    """

    name: str
    bucket: int | None
    norm: float
    own: float


@dataclass(frozen=True)
class GradientStatistics:
    """Gradient statistics of one synchronized backward, the same on every process. Can be pickled.

    Norms are Euclidean, over all parameters, in float64.

    Attributes:
        backward: the number of the backward, from 1.
        norm: of the gradients after backward; NaN if the step was skipped.
        rank_norms: by rank of the process group, of its gradient before the average. With weights,
            divided by the rank's weight. NaN for a rank without data, or with weight 0.
        noise_scale: the gradient noise scale ``tr(S) / |G|^2``, from running averages of both. Up
            to this batch size, a larger batch needs proportionally fewer steps (McCandlish et al.,
            "An Empirical Model of Large-Batch Training", 2018). The unit is the batch of one
            process, or with weights the unit of the weights. NaN with one process, and while the
            average of ``signal`` is not positive.
        noise: the estimate of ``tr(S)`` in this step, per batch of one process, or per sample.
        signal: the estimate of ``|G|^2`` in this step; may be negative.
        z_scores: by rank, how many standard deviations the logarithm of its norm is off. It is the
            smaller of two deviations: from the other ranks in this step, and from all ranks in the
            last steps. Both are estimated by medians. 0 in the first 16 steps.
        outliers: ranks whose norm is not finite although they had data, or whose absolute z score
            is above 10.
    """

    backward: int
    norm: float
    rank_norms: list[float]
    noise_scale: float
    noise: float
    signal: float
    z_scores: list[float]
    outliers: list[int]

    def __str__(self) -> str:
        lines = [f"backward number {self.backward}: gradient norm {self.norm:.6g}"]
        if not math.isnan(self.noise_scale):
            lines.append(f"noise scale {self.noise_scale:.4g}")
        for rank, (norm, score) in enumerate(zip(self.rank_norms, self.z_scores, strict=True)):
            mark = "  <- outlier" if rank in self.outliers else ""
            told = f"norm {norm:.6g}, z score {score:.2f}"
            if math.isnan(norm) and not mark:
                told = "no data in this step"
            lines.append(f"rank {rank}: {told}{mark}")
        return "\n".join(lines)


def clip(
    module: nn.Module,
    reducer: _core.Reducer,
    covered: Sequence[nn.Parameter],
    max_norm: float,
    nonfinite_raises: bool,
) -> torch.Tensor:
    """Like ``torch.nn.utils.clip_grad_norm_``. `covered` are the parameters of the reducer."""
    parameters = list(module.parameters())
    same = len(parameters) == len(covered) and all(map(operator.is_, parameters, covered))
    norm = reducer.gradient_norm() if same else None
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = None
    if norm is not None and grads:
        wide = any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)
        dtype = torch.float64 if wide else torch.float32
        total = torch.tensor(norm, dtype=dtype, device=grads[0].device)
    if norm is None or total is None or not math.isfinite(total):  # or too large for float32
        return nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=nonfinite_raises)
    if max_norm < norm + 1e-6:  # otherwise torch's function would multiply by 1
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
