# SPDX-License-Identifier: BSD-3-Clause
"""Undocumented names of torch's DistributedDataParallel that libraries use."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import bucket_names, check, check_equal, on_ranks, raises
from torch import nn

from apex.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)
        self.local = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.local(self.shared(x)))


IGNORED = ["local.weight", "local.bias", "count"]


@pytest.mark.processes
@on_ranks(2)
def test_ignored_parameters_and_buffers_are_left_alone(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = Net()
    model.count += rank
    own = model.local.weight.detach().clone()
    if rank == 1:
        model.local.weight = nn.Parameter(own[:2])  # may even have another shape
        model.local.weight = nn.Parameter(own)
    with raises(ValueError, "no parameter or buffer 'locl.bias'"):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["locl.bias"])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, IGNORED)
    ddp = DistributedDataParallel(model, broadcast_buffers=True)
    check_equal(ddp.parameters_to_ignore, set(IGNORED), "names")
    check(torch.equal(model.local.weight, own), "an ignored parameter was sent")
    names = ["shared.weight", "shared.bias", "norm.weight", "norm.bias"]
    check_equal(len(ddp.active_params), len(names), "active parameters")
    for step in range(3):
        ddp.zero_grad()
        torch.manual_seed(10 * step + rank)
        x = torch.randn(4, 3)
        grads = torch.autograd.grad(copy_loss(model, x), list(model.parameters()))
        mine = dict(zip([n for n, _ in model.named_parameters()], grads, strict=True))
        ddp(x).square().sum().backward()
        for name, param in model.named_parameters():
            expected = mine[name].clone()
            if name in names:
                dist.all_reduce(expected)
                expected /= world
            torch.testing.assert_close(param.grad, expected, rtol=1e-4, atol=1e-5)
        check_equal(model.count.item(), float(rank), "an ignored buffer")
        mean = model.norm.running_mean.clone()
        dist.broadcast(mean, 0)
        if step < 2:
            model.norm.running_mean += rank  # the next forward broadcasts rank 0's
    check_equal(sorted(sum(bucket_names(ddp), [])), sorted(names), "what is in the buckets")
    model.local.weight = nn.Parameter(own.clone())  # replacing an ignored parameter is no change
    built = ddp._engine.made
    ddp(torch.randn(4, 3)).sum().backward()
    check_equal(ddp._engine.made, built, "engines made")
    copied = copy.deepcopy(ddp)
    copied(torch.randn(4, 3)).sum().backward()
    check_equal(copied.parameters_to_ignore, set(IGNORED), "names in a copy")
    model.local.weight = nn.Parameter(own[:, :2])  # not compared, so ranks may differ
    DistributedDataParallel(model)


def copy_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of `model`. Restores the buffers."""
    before = [b.clone() for b in model.buffers()]
    loss = model(x).square().sum()
    for buffer, old in zip(model.buffers(), before, strict=True):
        buffer.data.copy_(old)
    return loss


@pytest.mark.processes
@on_ranks(2)
def test_semi_public_names_work_or_say_what_does(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    ddp = DistributedDataParallel(
        model, bucket_cap_mb_list=[1, 4, 2], batched_grad_copy=True, lazy_bucket_allocation=True
    )
    check_equal(ddp.bucket_cap_mb, 4, "the bucket size")
    check(not hasattr(ddp, "device_mesh"), "device_mesh was not given")

    # forward_sync_buffers is broadcast_buffers; require_forward_param_sync disables it
    check_equal(
        (ddp.forward_sync_buffers, ddp.require_forward_param_sync), (False, True), "options"
    )
    ddp.forward_sync_buffers = True
    check(ddp.broadcast_buffers, "forward_sync_buffers has no effect")
    model[1].momentum = 0.0
    for required in (False, True):
        model[1].running_mean.fill_(float(rank))
        ddp.require_forward_param_sync = required
        ddp(torch.randn(4, 3)).sum().backward()
        expected = 0.0 if required else float(rank)
        check_equal(model[1].running_mean[0].item(), expected, f"running mean, {required}")

    ddp._remove_autograd_hooks()
    ddp.zero_grad()
    (ddp(torch.full((4, 3), 1.0)).sum() * (rank + 1)).backward()
    bias = model[1].bias.grad[0].item()
    check_equal(bias, 4.0 * (rank + 1), "a gradient of this rank alone")


@pytest.mark.processes
@on_ranks(2)
def test_bucket_cap_mb_list_sizes_the_first_bucket_and_the_others(rank: int, world: int) -> None:
    quarter = [nn.Linear(256, 256, bias=False) for _ in range(6)]  # 1 MiB each
    for caps, sizes in ([0.25, 0.5], [1, 2, 2, 1]), ([0.5, 0.25, 1], [2, 4]), ([0.75], [3, 3]):
        ddp = DistributedDataParallel(
            nn.Sequential(*quarter), bucket_cap_mb_list=caps, batched_grad_copy=True
        )
        ddp(torch.ones(1, 256)).sum().backward()
        plan = bucket_names(ddp)
        check_equal([len(bucket) for bucket in plan], sizes, f"parameters by bucket for {caps}")


@pytest.mark.processes
@on_ranks(2)
def test_device_mesh_is_kept_and_left_behind_by_copies(rank: int, world: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    ddp = DistributedDataParallel(nn.Linear(2, 2), device_mesh=mesh)
    check(ddp.device_mesh is mesh, "the mesh that was given")
    copied = copy.deepcopy(ddp)
    check(not hasattr(copied, "device_mesh"), "a copy belongs to the default group")
    copied(torch.ones(1, 2)).sum().backward()


def test_constructor_takes_every_argument_of_torchs() -> None:
    torchs: Any = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    own = inspect.signature(DistributedDataParallel).parameters
    assert [name for name in torchs if name not in own] == []
