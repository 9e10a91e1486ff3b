# SPDX-License-Identifier: BSD-3-Clause
"""Communication hooks: the bucket that they receive, the results they may return; built-in ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import batch, build, data, make
from ddp_support import check, check_equal, check_step, on_ranks, raises
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step), [0, 1, 2]).square().sum()


def _yield(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


class Shapes(nn.Module):
    """Transposed, channels-last, scalar, empty and complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).mean((2, 3)) @ self.transposed * self.scale + self.empty.sum()
        return (y * self.turned).abs()


def _shapes_loss(model: nn.Module, rank: int) -> Tensor:
    return model(data(rank, 0, 2, 3, 4, 4)).square().sum()


@pytest.mark.parametrize("message_size", [1, 20, 10_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@on_ranks(2)
def test_comm_hook_set_buffer_gradients_are_its_views(
    rank: int, world: int, dtype: torch.dtype, message_size: int
) -> None:
    """The hook reads and writes the views of its own buffer."""
    ddp = DistributedDataParallel(build(Shapes), message_size=message_size)

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        before = [gradient.clone() for gradient in bucket.gradients()]
        other = bucket.buffer().to(dtype, copy=True)
        bucket.set_buffer(other)
        check(bucket.buffer() is other, "the buffer")
        for gradient, was, p in zip(bucket.gradients(), before, bucket.parameters(), strict=True):
            check_equal(gradient.to(was.dtype), was, f"a view of shape {tuple(p.shape)}")
            check_equal(gradient.stride(), was.stride(), "strides")
            gradient.div_(world)
        dist.all_reduce(other)
        return _yield(bucket.buffer())

    ddp.register_comm_hook(None, hook)
    for step in range(3):
        check_step(ddp, _shapes_loss, f"step {step}")


@on_ranks(1)
def test_comm_hook_set_buffer_of_another_size_raises(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(build())

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        bucket.set_buffer(bucket.buffer()[1:])
        return _yield(bucket.buffer())

    ddp.register_comm_hook(None, hook)
    with raises(RuntimeError, "set_buffer() takes a contiguous tensor of the bucket's"):
        _loss(ddp, rank).backward()


@pytest.mark.parametrize("inner", ["all_reduce", "power_sgd"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@on_ranks(2)
def test_comm_hook_of_torch_in_a_compress_wrapper_averages(
    rank: int, world: int, dtype: str, inner: str
) -> None:
    ddp = DistributedDataParallel(make(), message_size=30)
    state: Any = None
    hook = default_hooks.allreduce_hook
    if inner == "power_sgd":
        # Of full rank, from the third backward on.
        state = power_sgd.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=0.1
        )
        hook = power_sgd.powerSGD_hook
    ddp.register_comm_hook(state, getattr(default_hooks, f"{dtype}_compress_wrapper")(hook))
    for step in range(5):
        exact = inner != "power_sgd" or step < 2
        tolerance = {"fp16": 5e-3, "bf16": 3e-2}[dtype] if exact else 1.0
        check_step(
            ddp, lambda m, r, s=step: m(data(r, s, 3, 6)).square().mean(), f"step {step}", tolerance
        )


RESULTS: dict[str, Any] = {
    "contiguous": lambda flat: flat.clone().view(2, -1),
    "transposed": lambda flat: flat.view(2, -1).t().contiguous().t(),
    "transposed_narrow": lambda flat: flat.double().view(-1, 2).t().contiguous().t(),
    "column": lambda flat: flat.view(-1, 1),
    "column_of_more": lambda flat: torch.stack([flat, flat], 1)[:, :1],
    "same_memory_in_another_order": lambda flat: _shuffled(flat),
}


def _shuffled(flat: Tensor) -> Tensor:
    flat.copy_(flat.view(2, -1).t().reshape(-1))
    return flat.view(-1, 2).t()


@pytest.mark.parametrize("options", [{}, {"message_size": 1, "gradient_as_bucket_view": True}],
                         ids=["one_bucket", "alone_views"])  # fmt: skip
@pytest.mark.parametrize("name", RESULTS)
@on_ranks(2)
def test_comm_hook_result_of_any_shape_and_strides_is_taken_in_order(
    rank: int, world: int, name: str, options: dict[str, Any]
) -> None:
    ddp = DistributedDataParallel(build(), **options)

    def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        flat = bucket.buffer().div_(world)
        dist.all_reduce(flat)
        result = RESULTS[name](flat)
        return _yield(result if name != "column" else [result])

    ddp.register_comm_hook(None, hook)
    for step in range(3):
        check_step(ddp, lambda m, r, s=step: _loss(m, r, s), f"step {step}")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"message_size": 1, "gradient_as_bucket_view": True}],
                         ids=["one_bucket", "alone_views"])  # fmt: skip
@pytest.mark.parametrize("name", ["fp16", "bf16"])
@on_ranks()
def test_builtin_comm_hook_averages(
    rank: int, world: int, name: str, options: dict[str, Any]
) -> None:
    ddp = DistributedDataParallel(make(), **options)
    ddp.register_builtin_comm_hook(name)
    tolerance, narrow = (2e-3, torch.float16) if name == "fp16" else (1.5e-2, torch.bfloat16)
    for step in range(3):
        check_step(
            ddp, lambda m, r, s=step: m(batch(r, s)).square().sum(), f"step {step}", tolerance
        )
        for grad in (p.grad for p in ddp.parameters()):
            check_equal(grad, grad.to(narrow).to(grad.dtype), "fits the communication dtype")
    check(ddp.statistics()["launched_in_backward"] > 0, "nothing overlapped")


@on_ranks(1)
def test_builtin_comm_hook_errors_name_the_choices(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make())
    with raises(ValueError, "choose fp16 or bf16"):
        ddp.register_builtin_comm_hook("int8")
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with raises(RuntimeError, "already registered"):
        ddp.register_builtin_comm_hook("bf16")
