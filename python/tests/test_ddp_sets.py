# SPDX-License-Identifier: BSD-3-Clause
"""Changing sets of trainable parameters, in combination with other changes of plans.

The references: the average over ranks in float64 (``check_step``), bitwise equality of ranks with
different seeds, and the time limit of the pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_models import build, data
from ddp_support import (
    check,
    check_near,
    check_same_on_all_ranks,
    check_step,
    gradients,
    host_channel,
    on_ranks,
    raises,
    to_reference,
)
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes

CHANNEL = pytest.mark.parametrize("channel", ["1", "0"], ids=["shared_memory", "sockets"])


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(data(rank, step), [0, 1, 2]).square().mean()


def _wrapper(rank: int, channel: str, **options: Any) -> Any:
    torch.manual_seed(rank)
    with host_channel(channel):
        return DistributedDataParallel(build(), message_size=20, **options)


def _step(ddp: Any, step: int, what: str = "") -> None:
    check_step(ddp, lambda m, r: _loss(m, r, step), f"{what} step {step}")


# --- a rank without data ---

CHANGES = {
    "freezes": lambda ddp: ddp.module.layers[1].requires_grad_(False),
    "rebuilds": lambda ddp: ddp.rebuild_buckets(),
    "alternates": lambda ddp: ddp.module.layers[1].requires_grad_(
        not ddp.module.layers[1].weight.requires_grad
    ),
}


@CHANNEL
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(3)
def test_plans_that_change_under_join_when_a_rank_has_no_data(
    rank: int, world: int, channel: str, change: str
) -> None:
    """Ranks with data change the plan when rank 0 has none."""
    ddp = _wrapper(rank, channel)
    for step in range(2):
        _step(ddp, step, "before")
    with ddp.join():
        for step in range(2 if rank == 0 else 7):
            if step == 4 or (step > 4 and change == "alternates"):
                CHANGES[change](ddp)
            ddp.zero_grad()
            _loss(ddp, rank, 10 + step).backward()
            reference = to_reference(ddp.module)
            for r in range(0 if step < 2 else 1, world):
                x = data(r, 10 + step).double()
                (reference(x, [0, 1, 2]).square().mean() / world).backward()
            expected = gradients(reference)
            for name, grad in gradients(ddp.module).items():
                check_near(grad, expected[name], f"step {step}: {name}")
    ddp.module.requires_grad_(True)
    _step(ddp, 30, "after")
    _step(ddp, 31, "after")


# --- graphs from before a change ---


@CHANNEL
@on_ranks(2)
def test_a_graph_from_before_a_layer_was_frozen_and_unfrozen(
    rank: int, world: int, channel: str
) -> None:
    """As in a GAN's critic: it builds a graph, is frozen for another forward, and then runs its
    backward."""
    ddp = _wrapper(rank, channel)
    layer = ddp.module.layers[1]
    for step in range(4):
        _step(ddp, step)
        ddp.zero_grad()
        loss = _loss(ddp, rank, 10 + step)
        layer.requires_grad_(False)
        ddp(data(rank, 20), [0, 1, 2])
        layer.requires_grad_(True)
        loss.backward()
        reference = to_reference(ddp.module)
        for r in range(world):
            x = data(r, 10 + step).double()
            (reference(x, [0, 1, 2]).square().mean() / world).backward()
        expected = gradients(reference)
        for name, grad in gradients(ddp.module).items():
            check_near(grad, expected[name], f"step {step}: {name}")
        check_same_on_all_ranks([p.grad for p in ddp.parameters()], f"step {step}")


# --- refused steps ---


@CHANNEL
@on_ranks(2)
def test_a_skip_ends_with_the_refused_step(rank: int, world: int, channel: str) -> None:
    """skip_step() applies to the refused backward, and not to the next one."""
    ddp = _wrapper(rank, channel)
    layer = ddp.module.layers[1]
    _step(ddp, 0)
    _step(ddp, 1)
    ddp.zero_grad()
    if rank == 0:
        ddp.skip_step()
    layer.requires_grad_(rank == 0)
    with raises(RuntimeError, "'layers.1.weight' is frozen on rank 1 and trainable on rank 0"):
        _loss(ddp, rank, 3).backward()
    layer.requires_grad_(True)
    for step in range(4, 7):
        _step(ddp, step)
        check(not ddp.step_skipped, "skipped later")


@CHANNEL
@on_ranks(2)
def test_a_dtype_changed_and_changed_back_on_one_rank(rank: int, world: int, channel: str) -> None:
    """A change that one rank has reverted is no change."""
    ddp = _wrapper(rank, channel)
    _step(ddp, 0)
    _step(ddp, 1)
    if rank == 1:
        ddp.module.double()
        ddp(data(rank).double(), [0, 1, 2])
        ddp.module.float()
    for step in range(2, 5):
        _step(ddp, step)
