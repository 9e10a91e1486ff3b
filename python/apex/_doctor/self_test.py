# SPDX-License-Identifier: BSD-3-Clause
"""Compares the batch-norm kernels with float64, on this process's device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from apex.parallel import SyncBatchNorm

#: Largest error by dtype, relative to the largest value of a result: a few roundings of the dtype.
TOLERANCES = {
    "float64": 1e-12,
    "float32": 1e-5,
    "bfloat16": 2e-2,
    "float16": 2e-3,
}
_EPS, _MOMENTUM = 1e-5, 0.1


@dataclass(frozen=True)
class SelfTest:
    """The test of one dtype on one device.

    Attributes:
        error: the largest error of all results, relative to the largest value of a result; None
            if the test failed with ``problem``.
    """

    device: str
    dtype: str
    error: float | None
    tolerance: float
    problem: str | None = None
    rank: int = 0

    @property
    def has_passed(self) -> bool:
        return self.error is not None and self.error <= self.tolerance


def batch_norm(device: torch.device, rank: int = 0) -> list[SelfTest]:
    """Run one test per dtype: forward and backward, in both memory formats.

    Call this before a process group exists, which would synchronize training statistics.
    """
    return [_test(device, name, rank) for name in TOLERANCES]


def _test(device: torch.device, name: str, rank: int) -> SelfTest:
    dtype, tolerance = getattr(torch, name), TOLERANCES[name]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            errors = [
                error
                for layout in (torch.contiguous_format, torch.channels_last)
                for error in _errors(device, dtype, layout)
            ]
    except (RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return SelfTest(str(device), name, None, tolerance, first, rank)
    if not all(map(math.isfinite, errors)):
        return SelfTest(str(device), name, None, tolerance, "a result is infinite or NaN", rank)
    return SelfTest(str(device), name, max(errors), tolerance, None, rank)


def _errors(
    device: torch.device, dtype: torch.dtype, layout: torch.memory_format
) -> Iterator[float]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device="cpu")

    channels = 24
    x = (2 * draw(16, channels, 9, 7) + 3).to(device, dtype).contiguous(memory_format=layout)
    dy = draw(16, channels, 9, 7).to(device, dtype).contiguous(memory_format=layout)
    module = SyncBatchNorm(channels, _EPS, _MOMENTUM).to(device)
    if dtype == torch.float64:
        module.double()
    with torch.no_grad():
        module.weight.copy_(1 + draw(channels) / 4)
        module.bias.copy_(draw(channels))
    parameters = [module.weight, module.bias]
    wanted_of = [tensor.detach().double().requires_grad_() for tensor in (x, *parameters)]
    wanted, mean, variance = _reference(*wanted_of)
    wanted_grads = torch.autograd.grad(wanted, wanted_of, dy.double())
    count = x.numel() // channels
    running = [_MOMENTUM * mean, 1 - _MOMENTUM + _MOMENTUM * variance * count / (count - 1)]

    x.requires_grad_()
    y = module(x)
    grads = torch.autograd.grad(y, [x, *parameters], dy)
    found = [y, *grads, module.running_mean, module.running_var]
    for got, want in zip(found, [wanted, *wanted_grads, *running], strict=True):
        assert isinstance(got, Tensor)
        wide, exact = got.detach().double(), want.detach()
        yield float((wide - exact).abs().max() / exact.abs().max())


def _reference(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, mean and biased variance, computed by their definitions."""

    def by_channel(values: Tensor) -> Tensor:
        return values.view(1, -1, 1, 1)

    mean = x.mean((0, 2, 3))
    variance = (x - by_channel(mean)).square().mean((0, 2, 3))
    y = (x - by_channel(mean)) / by_channel(variance + _EPS).sqrt()
    return y * by_channel(weight) + by_channel(bias), mean.detach(), variance.detach()
