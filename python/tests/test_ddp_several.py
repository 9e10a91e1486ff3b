# SPDX-License-Identifier: BSD-3-Clause
"""Several wrappers, groups and users of a group at the same time.

The references: the average over ranks in one process in float64, bitwise equality of ranks with
different seeds, and the time limit of the pool."""

from __future__ import annotations

import gc
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from ddp_models import build, data
from ddp_support import (
    check_equal,
    check_same_on_all_ranks,
    check_step,
    on_ranks,
    raises,
)
from nccl_like import eager_nccl
from torch import nn

from apex._internal import groups
from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("ends", ["same", "outer", "kept output"])
@pytest.mark.parametrize("how", ["method", "inputs", "forward"])
@on_ranks(2)
def test_wrapper_is_dropped_the_other_one_averages(
    rank: int, world: int, how: str, ends: str
) -> None:
    """Hazard: the remaining wrapper does not own the parameters, and nothing is averaged."""
    torch.manual_seed(rank)
    net = nn.Linear(4, 1)
    net.score = lambda x: nn.Module.__call__(net, x).sigmoid()  # type: ignore[assignment]
    first = DistributedDataParallel(net)
    if ends == "same":
        second = DistributedDataParallel(net)
    else:
        second = DistributedDataParallel(nn.Sequential(net, nn.Linear(1, 1)))
        second(torch.randn(2, 4)).sum().backward()
    kept = second(torch.randn(2, 4)).sum() if ends == "kept output" else None
    del second
    gc.collect()
    for _ in range(2):
        x = torch.randn(8, 4)
        first.zero_grad()
        out = first.module.score(x) if how == "method" else first(x)
        inputs = list(net.parameters()) if how == "inputs" else None
        out.mean().backward(inputs=inputs)
        check_same_on_all_ranks([p.grad for p in net.parameters()], how)
    if kept is not None:
        kept.backward()  # its wrapper takes the parameters back, for this time
        first.zero_grad()
        first.module.score(torch.randn(8, 4)).mean().backward()
        check_same_on_all_ranks([net.weight.grad], "afterwards")


@on_ranks(2)
def test_shared_parameter_is_cast_backward_with_inputs_averages_it(rank: int, world: int) -> None:
    """Hazard: a cast drops the hooks of the wrapper that owns the parameter."""
    torch.manual_seed(rank)
    net = nn.Linear(4, 1)
    first, second = DistributedDataParallel(net), DistributedDataParallel(nn.Sequential(net))
    first(torch.randn(8, 4)).mean().backward()
    net.double().zero_grad()
    second(torch.randn(8, 4).double()).mean().backward(inputs=[net.weight])
    check_same_on_all_ranks([net.weight.grad], "after the cast")


@on_ranks(3)
def test_several_communicators_of_eager_nccl_are_created_for_all_ranks(
    rank: int, world: int
) -> None:
    pair = dist.new_group([0, 1])
    with eager_nccl() as asked:
        ddp = DistributedDataParallel(build(), message_size=1, num_allreduce_streams=3)
        check_equal(asked, 2 * ["synchronize", "new_group"], "calls")
        if rank < 2:
            with raises(ValueError, "process groups in allreduce_communicators"):
                DistributedDataParallel(build(), num_allreduce_streams=2, process_group=pair)
    for step in range(3):
        check_step(ddp, lambda m, r, s=step: m(data(r, s), [0, 1, 2]).square().mean(), f"{step}")


@on_ranks(3)
def test_groups_of_nccl_beside_gloo_are_not_split(rank: int, world: int) -> None:
    """Hazard: split_group() passes NCCL's options to the Gloo backend for the CPU."""
    kinds = unittest.mock.patch.object(groups, "backend_name", lambda group, device: str(device))
    with eager_nccl() as asked, kinds:
        part = groups.split_world([[0, 1], [2]])
        check_equal(asked, ["synchronize", "new_group", "new_group"], "calls")
    check_equal(part.size(), 2 if rank < 2 else 1, "ranks of the part")
