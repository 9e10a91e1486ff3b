# SPDX-License-Identifier: BSD-3-Clause
"""The operators take counters, running statistics and parameters of every dtype and stride, as
torch's batch norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sync_batch_norm_support import (
    OperatorBatchNorm,
    device,  # noqa: F401  (a fixture)
)
from torch import Tensor, nn

COUNTERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
            torch.float16, torch.bfloat16, torch.float32, torch.float64]  # fmt: skip


def _pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    return OperatorBatchNorm(3, **options), nn.BatchNorm1d(3, **options)


def _train(ours: nn.Module, theirs: nn.Module, steps: int = 3) -> None:
    """Check that outputs, gradients and buffers are the same."""
    for _ in range(steps):
        x = torch.randn(4, 3, 5)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [module(leaf) for module, leaf in zip((ours, theirs), leaves, strict=True)]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            output.pow(3).sum().backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
    gradients = [[p.grad for p in module.parameters()] for module in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("momentum", [None, 0.3])
@pytest.mark.parametrize("dtype", COUNTERS, ids=str)
def test_counter_of_any_number_type_counts_as_torchs(
    dtype: torch.dtype, momentum: float | None
) -> None:
    ours, theirs = _pair(momentum=momentum)
    for module in (ours, theirs):
        module.num_batches_tracked = module.num_batches_tracked.to(dtype)
    counter = ours.num_batches_tracked
    _train(ours, theirs)
    assert ours.num_batches_tracked is counter and counter.dtype == dtype and int(counter) == 3


@pytest.mark.usefixtures("device")
def test_counter_with_a_dimension_counts() -> None:
    ours, theirs = _pair(momentum=None)
    for module in (ours, theirs):
        module.num_batches_tracked = torch.zeros(1, dtype=torch.int32)
    _train(ours, theirs)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("momentum", [None, 0.3])
def test_no_counter_is_as_in_torch(momentum: float | None) -> None:
    # Without momentum, the number of batches is unknown, so the statistics keep their values.
    ours, theirs = _pair(momentum=momentum)
    for module in (ours, theirs):
        module.num_batches_tracked = None
    _train(ours, theirs)
    assert torch.equal(ours.running_mean, torch.zeros(3)) == (momentum is None)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("momentum", [-0.5, -1.0, 1.5])
def test_momentum_of_any_value_is_taken_as_in_torch(momentum: float) -> None:
    _train(*_pair(momentum=momentum))


def _strided(tensor: Tensor) -> Tensor:
    wide = tensor.detach().repeat_interleave(3).view(-1, 3)
    wide[:, 1:] = float("nan")
    return wide[:, 0]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_strided_parameters_and_buffers_are_as_in_torch(dtype: torch.dtype) -> None:
    for shape in [(4, 3), (4, 3, 5), (2, 3, 4, 4)]:
        contiguous = OperatorBatchNorm(3, dtype=dtype)
        nn.init.uniform_(contiguous.weight)
        nn.init.uniform_(contiguous.bias)
        module = OperatorBatchNorm(3, dtype=dtype)
        module.weight = nn.Parameter(_strided(contiguous.weight))
        module.bias = nn.Parameter(_strided(contiguous.bias))
        module.running_mean = _strided(contiguous.running_mean)
        module.running_var = _strided(contiguous.running_var)
        tensors = [*module.parameters(), module.running_mean, module.running_var]
        assert all(tensor.stride() == (3,) for tensor in tensors)
        for _ in range(2):
            x = torch.randn(shape, dtype=dtype)
            pair = [x.clone().requires_grad_() for _ in range(2)]
            y, want = module(pair[0]), contiguous(pair[1])
            assert torch.equal(y, want)
            y.square().sum().backward()
            want.square().sum().backward()
            assert torch.equal(pair[0].grad, pair[1].grad)
        for name, tensor in contiguous.state_dict().items():
            assert torch.equal(module.state_dict()[name], tensor), name
        for name, parameter in contiguous.named_parameters():
            assert torch.equal(module.get_parameter(name).grad, parameter.grad), name
        base = module.running_mean._base
        # elements in the gaps are not changed
        assert base is not None and base[:, 1:].isnan().all()


@pytest.mark.usefixtures("device")
def test_running_statistics_versions_move_once_per_batch() -> None:
    module = OperatorBatchNorm(4)
    buffers = [module.running_mean, module.running_var, module.num_batches_tracked]
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        before = [buffer._version for buffer in buffers]
        with mode():
            module(torch.randn(2, 4))
        assert [buffer._version for buffer in buffers] == [version + 1 for version in before]
