# SPDX-License-Identifier: BSD-3-Clause
"""Tensors without memory of their own, and others that cannot be synchronized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_models import data
from ddp_program_nets import Quantized
from ddp_support import check, check_near, on_ranks, raises
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


@on_ranks(2)
def test_trainable_subclass_is_refused_by_name(rank: int, world: int) -> None:
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(Quantized.of(torch.randn(3, 4)))
    with raises(ValueError, f"rank {rank}: parameter 'weight' is a tensor subclass without memory"):
        DistributedDataParallel(model)


class Zeros(torch.autograd.Function):
    """Its gradient is a ZeroTensor, which has no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch._efficientzerotensor(grad.shape)


@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_zero_tensor_gradient_counts_as_zeros(rank: int, world: int, views: bool) -> None:
    for size in (20, 1):
        layer = nn.Linear(4, 3)
        ddp = DistributedDataParallel(layer, message_size=size, gradient_as_bucket_view=views)
        for _ in range(3):
            ddp.zero_grad()
            y = ddp(torch.ones(2, 4))
            (Zeros.apply(layer.weight).sum() if rank == 1 else layer.weight.sum()).add(
                y.sum() * 0
            ).backward()
            check_near(layer.weight.grad, torch.full((3, 4), 0.5), "half of rank 0's", 1e-6)
            layer.weight.grad.add_(1)  # it can be written


CAUSES = {
    "sparse": "layout is Sparse",
    "quantized": "dtype is quantized (QInt8)",
    "meta": "on the meta device",
}
BAD = [
    ("sparse", "frozen"), ("sparse", "buffer"), ("sparse", "trainable"), ("quantized", "frozen"),
    ("quantized", "buffer"), ("meta", "frozen"), ("meta", "trainable"), ("meta", "buffer"),
]  # fmt: skip


def _bad(kind: str) -> Tensor:
    values = torch.randn(3, 4)
    if kind == "sparse":
        return values.to_sparse()
    if kind == "quantized":
        return torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)
    return values.to("meta")


@pytest.mark.parametrize("on", [[0, 1], [1]], ids=["all_ranks", "rank_1"])
@on_ranks(2)
def test_tensors_that_cannot_be_sent_are_refused_by_name_on_every_rank(
    rank: int, world: int, on: list[int]
) -> None:
    for kind, where in BAD:
        model = nn.Linear(4, 3)
        value = _bad(kind) if rank in on else torch.randn(3, 4)
        if where == "buffer":
            model.register_buffer("other", value)
        else:
            model.other = nn.Parameter(value, requires_grad=where == "trainable")
        if len(on) == world:
            what = "buffer" if where == "buffer" else "parameter"
            expected = raises(ValueError, f"rank {rank}: {what} 'other'", CAUSES[kind])
        else:
            expected = raises(RuntimeError, "rank 1's model differs from rank 0's", "other")
        with expected:
            DistributedDataParallel(model, broadcast_buffers=True)
    # No rank waits for another, and the group can still be used.
    good = DistributedDataParallel(nn.Linear(4, 3))
    good(data(rank, 0, 6, 4)).sum().backward()
    check(good.module.weight.grad is not None, "no gradient")
