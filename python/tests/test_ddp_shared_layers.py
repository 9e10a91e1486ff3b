# SPDX-License-Identifier: BSD-3-Clause
"""Layers shared by several wrappers, which ranks use in different ways.

The references: the average over ranks in one process in float64, and the time limit of the pool.
Ranks run forwards in different orders, and some evaluate models that others do not. This must not
affect which wrapper averages a gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ddp_support import check_near, gradients, on_ranks, raises, to_reference
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def batch(rank: int, step: int) -> Tensor:
    return torch.sin(torch.arange(12, dtype=torch.float32).view(3, 4) + 5 * step + 2 * rank)


class TwoHeads(nn.Module):
    """Two models that share their first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.first = nn.Sequential(self.shared, nn.Tanh(), nn.Linear(4, 2))
        self.second = nn.Sequential(self.shared, nn.Tanh(), nn.Linear(4, 3))


def check_step(
    model: nn.Module, loss: Callable[[nn.Module, int], Tensor], world: int, what: str
) -> None:
    reference = to_reference(model)
    sum(loss(reference, rank) for rank in range(world)).div(world).backward()
    expected = gradients(reference)
    for name, parameter in model.named_parameters():
        check_near(parameter.grad, expected[name], f"{what}: {name}")


@on_ranks(2)
def test_a_copy_is_evaluated_by_one_rank_and_connects_in_training(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(TwoHeads().first)
    average = torch.optim.swa_utils.AveragedModel(ddp).eval()
    if rank == 0:  # one rank evaluates a copy, with gradients enabled
        average(batch(0, 0))
    with raises(RuntimeError, "its first forward ran in eval()"):
        average(batch(rank, 0)).sum().backward()
    average.train()
    average(batch(rank, 1)).square().mean().backward()
    check_step(
        average.module.module,
        lambda m, r: m(batch(r, 1).double()).square().mean(),
        world,
        "the copy, once connected",
    )


@on_ranks(4)
def test_ranks_of_a_subgroup_are_named_so_that_they_can_be_found(rank: int, world: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.Linear(4, 2)
    ddp = DistributedDataParallel(model, process_group=groups[rank // 2])
    loss = ddp(batch(rank, 0)).sum()
    if rank == 3:
        model.weight.register_hook(lambda grad: 1 / 0)
    if rank == 2:
        with raises(RuntimeError, "an exception on rank 1", "ranks 2, 3 of the job"):
            loss.backward()
    elif rank == 3:
        with raises(ZeroDivisionError, "division by zero"):
            loss.backward()
    else:
        loss.backward()
