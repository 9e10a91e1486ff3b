# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the tests of SyncBatchNorm: a simple float64 reference, and ranks as processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from apex.parallel import SyncBatchNorm

TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


#: Tests with this parameter create all tensors on each device: see the fixture ``device``.
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Sets the default device of tensors and modules during the test."""
    with torch.device(request.param):
        yield request.param


def draw(size: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """The same random values on every device."""
    values = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
    return values.to(torch.get_default_device(), dtype)


def first_seed() -> int:
    """Every run has the same programs; APEX_TEST_SEED chooses others."""
    return int(os.environ.get("APEX_TEST_SEED", "1000"))


def reference_batch_norm(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    channel_last: bool,
    relu: bool,
    statistics: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm from primitive operations: output, mean, biased variance."""
    channel = x.dim() - 1 if channel_last or x.dim() == 2 else 1
    others = [d for d in range(x.dim()) if d != channel]
    shape = [1] * x.dim()
    shape[channel] = -1
    if statistics is None:
        mean = x.mean(others)
        var = ((x - mean.view(shape)) ** 2).mean(others)
    else:
        mean, var = statistics
    y = (x - mean.view(shape)) / (var.view(shape) + eps).sqrt()
    if weight is not None:
        y = y * weight.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    if z is not None:
        y = y + z
    return (y.relu() if relu else y), mean, var


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    """Check the largest error, relative to the largest value, against the dtype's tolerance."""
    actual = actual.detach().double()
    expected = expected.detach().double()
    assert actual.shape == expected.shape, f"{what}: {actual.shape} for {expected.shape}"
    if actual.numel() == 0:
        return
    error = (actual - expected).abs().max().item()
    scale = max(1.0, expected.abs().max().item())
    assert error <= TOLERANCE[dtype] * scale, f"{what}: error {error:.3g} at scale {scale:.3g}"


class OperatorBatchNorm(SyncBatchNorm):
    """One rank that takes the operators of several ranks."""

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        output: Tensor = torch.ops.apex.sync_batch_norm(
            input, self.weight, self.bias, self.running_mean, self.running_var,
            self.num_batches_tracked, self.momentum, self.eps, "",
        )[0]  # fmt: skip
        return output


class CutGradient(torch.autograd.Function):
    """A copy that passes no gradient back if ``cut``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: bool) -> Tensor:
        ctx.cut = cut
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        return None if ctx.cut else dy, None
