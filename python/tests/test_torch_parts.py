# SPDX-License-Identifier: BSD-3-Clause
"""torch features that save and shard optimizers accept ours, on two ranks.

The reference is the same job without the feature, which must have the same bits.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoints
from ddp_support import check, check_equal, on_ranks
from torch import nn
from torch.distributed.checkpoint import state_dict

from apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes
OPTIMIZERS = {
    "adam": (FusedAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "lamb": (FusedLAMB, {"lr": 0.01}),
    "novograd": (FusedNovoGrad, {"lr": 0.01}),
    "adagrad": (FusedAdagrad, {"lr": 0.01}),
    "sgd": (FusedSGD, {"lr": 0.1, "momentum": 0.9}),
}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def make(name: str, net: nn.Module) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    return kind(net.parameters(), **options)


def train(ddp: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(6, 3, generator=generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()


def check_same_parameters(found: nn.Module, wanted: nn.Module, start: nn.Module) -> None:
    for name, parameter in found.named_parameters():
        check_equal(parameter.detach(), wanted.get_parameter(name).detach(), name)
        check(not torch.equal(parameter, start.get_parameter(name)), f"{name} was not trained")


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_distributed_checkpoint_resumed_equals_the_run_that_was_not_stopped(
    rank: int, world: int, name: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    whole = DistributedDataParallel(network(rank))
    start = copy.deepcopy(whole.module)
    optimizer = make(name, whole)
    train(whole, optimizer, range(3), rank)
    model, state = state_dict.get_state_dict(whole.module, optimizer)
    checkpoints.save({"model": model, "optimizer": state}, checkpoint_id=folder)
    train(whole, optimizer, range(3, 6), rank)

    net = network(100 + rank)
    again = make(name, net)
    model, state = state_dict.get_state_dict(net, again)
    loaded = {"model": model, "optimizer": state}
    checkpoints.load(loaded, checkpoint_id=folder)
    state_dict.set_state_dict(
        net, again, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    train(DistributedDataParallel(net), again, range(3, 6), rank)
    check_same_parameters(net, whole.module, start)


@on_ranks(2)
def test_distributed_checkpoint_names_are_those_of_state_dict(rank: int, world: int) -> None:
    """With or without the wrapper, a saved state loads into the other."""
    ddp = DistributedDataParallel(network(rank))
    inside = state_dict.get_model_state_dict(ddp.module)
    check_equal(sorted(inside), sorted(ddp.module.state_dict()), "names of the module")
    outside = state_dict.get_model_state_dict(ddp)
    check_equal(sorted(outside), [f"module.{name}" for name in sorted(inside)], "of the wrapper")
    other = DistributedDataParallel(network(7))
    state_dict.set_model_state_dict(other, outside)
    for found, wanted in zip(other.parameters(), ddp.parameters(), strict=True):
        check_equal(found.detach(), wanted.detach(), "what was set")
