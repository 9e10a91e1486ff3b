# SPDX-License-Identifier: BSD-3-Clause
"""Gradient accumulation: no_sync(), disable_allreduce(), and what the next step includes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import build, data
from ddp_steps_support import backward, make, mean_gradients
from ddp_support import (
    check,
    check_equal,
    check_gradients,
    check_near,
    check_step,
    gradients,
    on_ranks,
    raises,
)
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

EVERY = [0, 1, 2]


def _loss(model: nn.Module, rank: int, step: int = 0, used: Any = EVERY) -> Tensor:
    return model(data(rank, step), used).square().mean()


def _accumulated(model: nn.Module, rank: int, steps: list[tuple[int, Any]]) -> Any:
    plain = copy.deepcopy(model)
    plain.zero_grad()
    for step, used in steps:
        _loss(plain, rank, step, used).backward()
    return gradients(plain)


@on_ranks(2)
def test_no_sync_left_by_exception_synchronizes_again(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(build(), message_size=20)
    with raises(KeyError):
        with ddp.no_sync():
            raise KeyError("on purpose")
    check(ddp.require_backward_grad_sync, "no_sync() is still in force")
    for step in range(2):
        check_step(ddp, _loss, f"step {step}")
    with raises(ZeroDivisionError):
        with ddp.no_sync():
            _loss(ddp, rank, 3).backward()
            raise ZeroDivisionError
    ddp.zero_grad()
    check_step(ddp, _loss, "after a failure between two backwards")
    ddp.disable_allreduce()
    with ddp.no_sync():
        pass
    check(not ddp.require_backward_grad_sync, "no_sync() switched disabled all-reduces on")
    ddp.enable_allreduce()
    check_step(ddp, _loss, "enabled again")


@on_ranks(2)
def test_no_sync_backward_alone_is_local(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(build(), message_size=20)
    with ddp.no_sync():
        _loss(ddp, rank).backward()
    check_gradients(ddp, _accumulated(ddp.module, rank, [(0, EVERY)]), "local", 1e-5)
    check_equal(ddp.statistics()["backwards"], 0, "synchronized backwards")
    if rank == 0:  # no other rank is needed
        with ddp.no_sync():
            _loss(ddp, rank).backward()
    dist.barrier()


# --- bit for bit ---


class _Exact(nn.Module):
    """Gradients that floating point represents exactly, for any order of summation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(4, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-3, 4, parameter.shape).float())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def _exact_batch(rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank * 10 + micro)
    return torch.randint(-4, 5, (2, 5), generator=generator).float()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("micros", [1, 4])
@on_ranks()
def test_accumulation_equals_big_batch_bit_for_bit(rank: int, world: int, micros: int) -> None:
    model = build(_Exact)
    big = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, message_size=20)
    for step in range(3):
        ddp.zero_grad()
        big.zero_grad()
        for micro in range(micros):
            loss = ddp(_exact_batch(rank, step * 10 + micro)).sum() / micros
            if micro + 1 < micros:
                with ddp.no_sync():
                    loss.backward()
            else:
                loss.backward()
        whole = [_exact_batch(r, step * 10 + m) for r in range(world) for m in range(micros)]
        (big(torch.cat(whole)).sum() / (micros * world)).backward()
        for (name, ours), theirs in zip(model.named_parameters(), big.parameters(), strict=True):
            check_equal(ours.grad, theirs.grad, f"step {step}: {name}")


# --- accumulated sums that would be reduced twice ---


@on_ranks(2)
def test_sums_not_cleared_between_backwards_raise(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make(), gradient_average=False)
    backward(ddp, rank, 0)
    with raises(RuntimeError, "still held the gradient that the last synchronized backward summed"):
        backward(ddp, rank, 1)
    for set_to_none in (True, False):
        ddp.zero_grad(set_to_none=set_to_none)
        with ddp.no_sync():
            backward(ddp, rank, 0)
        backward(ddp, rank, 1)
    first, second = (mean_gradients(ddp.module, world, step) for step in (0, 1))
    for name, grad in gradients(ddp).items():
        check_near(grad, world * (first[name] + second[name]), name, 1e-4)
