# SPDX-License-Identifier: BSD-3-Clause
"""gradient_average="weighted": the gradient of the mean over the global batch. Random weights of
ranks and micro-batches are in ddp_programs.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_support import check, check_equal, on_ranks, raises
from torch import nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def _ddp(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return DistributedDataParallel(
        net, message_size=20, **{"gradient_average": "weighted", **options}
    )


def _backward(ddp: nn.Module, weight: Any, samples: int = 2) -> None:
    with ddp.weight(weight):  # type: ignore[operator]
        ddp(torch.ones(samples, 4)).sum().backward()


@on_ranks(2)
def test_weighted_wrong_or_missing_weight_is_named_on_every_rank(rank: int, world: int) -> None:
    ddp = _ddp()
    _backward(ddp, 2)
    before = [p.grad.clone() for p in ddp.parameters()]
    for wrong in (-1.0, float("inf"), float("nan"), torch.tensor(-3)):
        ddp.zero_grad()
        text = "passed NaN" if wrong != wrong else "passed the weight"
        with raises(RuntimeError, f"rank {rank}: rank 1 ", text):
            _backward(ddp, wrong if rank == 1 else 2)
    ddp.zero_grad()
    with raises(RuntimeError, f"rank {rank}: rank 0 ran a backward outside weight()"):
        if rank == 0:
            ddp(torch.ones(2, 4)).sum().backward()
        else:
            _backward(ddp, 2)
    ddp.zero_grad()
    with raises(RuntimeError, f"rank {rank}: rank 0 ran a backward outside weight()"):
        with ddp.no_sync():  # one weight per accumulation is enough
            if rank == 0:
                ddp(torch.ones(2, 4)).sum().backward()
            else:
                _backward(ddp, 2)
        _backward(ddp, 2)
    # All ranks continue, without the weights of the failed backward.
    ddp.zero_grad()
    _backward(ddp, 2)
    check_equal(ddp.total_weight, 2.0 * world, "total")
    for parameter, gradient in zip(ddp.parameters(), before, strict=True):
        check(torch.equal(parameter.grad, gradient), "another gradient than at first")


@on_ranks(2)
def test_weighted_what_cannot_be_is_refused(rank: int, world: int) -> None:
    with raises(ValueError, "True, False or 'weighted'"):
        _ddp(gradient_average="mean")
    with raises(ValueError, "gradient_predivide_factor"):
        _ddp(gradient_predivide_factor=2.0)
    plain = _ddp(gradient_average=True)
    with raises(RuntimeError, "averaged without weights"), plain.weight(1):
        pass
    ddp = _ddp()
    for wrong in (torch.ones(2), torch.ones(()) * 1j, torch.ones((), device="meta")):
        with raises(ValueError, "a weight must be a real number"), ddp.weight(wrong):
            pass
    with ddp.weight(1), raises(RuntimeError, "inside another weight()"), ddp.weight(1):
        pass
    _backward(ddp, 3)  # outside of the block above
    check_equal(ddp.total_weight, 3.0 * world, "total")
    with raises(RuntimeError, "still held the gradient that the last synchronized backward"):
        _backward(ddp, 3)
    ddp.zero_grad()
    with raises(KeyError, "from a loop"):
        with ddp.weight(5):
            raise KeyError("from a loop")
    _backward(ddp, 1)
    check_equal(ddp.total_weight, 1.0 * world, "total after an exception in a block")


@on_ranks(2)
def test_weighted_total_of_zero_leaves_zero_gradients(rank: int, world: int) -> None:
    ddp = _ddp()
    _backward(ddp, 0)
    check_equal(ddp.total_weight, 0.0, "total")
    check(all(not p.grad.any() for p in ddp.parameters()), "gradients of no sample")
    ddp.zero_grad()
    with ddp.weight(0):  # the gradient of a mean over nothing
        (ddp(torch.ones(2, 4)).sum() * float("nan")).backward()
    check(all(not p.grad.any() for p in ddp.parameters()), "gradients of no sample, NaN")
    ddp.zero_grad()
    _backward(ddp, rank)  # rank 0 has weight 0
    check_equal(ddp.total_weight, float(sum(range(world))), "total")


@on_ranks(2)
def test_weighted_float16_sums_do_not_overflow(rank: int, world: int) -> None:
    """float16 sums that would overflow. The mean is 30."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 1, bias=False).half()
    ddp = DistributedDataParallel(layer, gradient_average="weighted")
    samples = 1024 * (1 + rank)  # sums by rank: 30,720 and 61,440; in total over 65,504
    for step in range(3):
        ddp.zero_grad()
        with ddp.weight(samples):
            (ddp(torch.full((1, 8), 30.0).half()).sum() * samples).backward()
        check(torch.equal(layer.weight.grad, torch.full((1, 8), 30.0).half()), f"step {step}")


@on_ranks(2)
def test_weighted_backward_through_a_frozen_module_is_of_no_samples(rank: int, world: int) -> None:
    discriminator, generator = _ddp(), nn.Linear(4, 4)
    for parameter in discriminator.module.parameters():
        parameter.requires_grad_(False)
    with discriminator.no_sync():  # in the generator's step, these are not its samples
        discriminator(generator(torch.ones(7, 4))).sum().backward()
    with discriminator.no_sync(), discriminator.weight(7):
        discriminator(generator(torch.ones(7, 4))).sum().backward()
    for parameter in discriminator.module.parameters():
        parameter.requires_grad_(True)
    _backward(discriminator, 3)
    check_equal(discriminator.total_weight, 3.0 * world, "total of the discriminator")


@on_ranks(2)
def test_weighted_accumulation_keeps_its_weights(rank: int, world: int) -> None:
    ddp = _ddp()
    with raises(RuntimeError, "rank 0 passed the weight -3"):
        with ddp.no_sync():
            _backward(ddp, -3 if rank == 0 else 3)
        _backward(ddp, 4)
    ddp.zero_grad()
    with raises(RuntimeError, "the sum of the weights of all ranks is not finite"):
        _backward(ddp, 1.7e308)
    ddp.zero_grad()
    _backward(ddp, 2)
    ddp.zero_grad()
    with ddp.no_sync():
        for _ in range(9):
            _backward(ddp, 1)
    ddp.module.add_module("more", nn.Linear(2, 2))
    _backward(ddp, 1)
    check_equal(ddp.total_weight, 10.0 * world, "total when the module changed in between")


@on_ranks(3)
def test_weighted_mean_is_of_all_ranks(rank: int, world: int) -> None:
    ddp = _ddp()
    with ddp.weight(1 + rank):
        loss = ddp(torch.ones(1 + rank, 4)).sum()
        loss.backward()
    mean = ddp.weighted_mean(loss)
    alone = ddp.module(torch.ones(1, 4)).sum()
    check(not mean.requires_grad, "a gradient")
    check(torch.allclose(mean, alone), f"{mean} and {alone}")
    check_equal(ddp.weighted_mean(torch.tensor(1 + rank)).item(), 1.0, "mean of integers")


@on_ranks(2)
def test_weighted_gradients_cleared_in_an_accumulation_do_not_count(rank: int, world: int) -> None:
    """Also where backward reaches no output of the wrapper: the first gradient shows it."""
    for form in ("call", "module", "inputs"):
        ddp = _ddp()
        forward = ddp.module if form == "module" else ddp

        def backward(forward: nn.Module = forward, ddp: Any = ddp, form: str = form) -> None:
            loss = forward(torch.ones(2, 4)).sum()
            loss.backward(inputs=list(ddp.parameters()) if form == "inputs" else None)

        with ddp.no_sync(), ddp.weight(4):
            backward()
        ddp.zero_grad()
        with ddp.weight(4):
            backward()
        check_equal(ddp.total_weight, 4.0 * world, f"{form}: total")
        ddp.zero_grad()
        for weight in (4, 3):  # the first is dropped
            ddp.zero_grad()
            with ddp.no_sync(), ddp.weight(weight):
                backward()
        with ddp.weight(4):
            backward()
        check_equal(ddp.total_weight, 7.0 * world, f"{form}: total of two micro-batches")


@on_ranks(2)
def test_weighted_join_does_not_count_samples_whose_gradients_a_rank_has_cleared(
    rank: int, world: int
) -> None:
    ddp = _ddp()
    with ddp.no_sync():
        _backward(ddp, 5)
    ddp.zero_grad()
    with ddp.join():
        if rank == 1:
            _backward(ddp, 2)
            check_equal(ddp.total_weight, 2.0, "total: rank 0 has no data")
