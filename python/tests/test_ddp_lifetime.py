# SPDX-License-Identifier: BSD-3-Clause
"""Wrappers in a reference cycle are freed, together with the objects that they hold."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import build, data
from ddp_support import check, check_equal, check_step, on_ranks, raises
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook

from apex.parallel import DistributedDataParallel

pytestmark = pytest.mark.processes


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(data(rank), [0, 1, 2]).square().sum()


def _averages(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Trainer:
    """Holds the wrapper, and is held by the hooks that it registers."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self.buckets = 0

    def hook(self, state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        self.buckets += 1
        return _averages(state, bucket)


def _in_module(ddp: DistributedDataParallel) -> None:
    ddp.module.wrapper = ddp


def _beside_module(ddp: DistributedDataParallel) -> None:
    ddp.module.__dict__["wrapper"] = ddp


def _in_state(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook({"wrapper": ddp}, _averages)


def _in_hook(ddp: DistributedDataParallel) -> Trainer:
    trainer = Trainer(ddp)
    ddp.register_comm_hook(None, trainer.hook)
    return trainer


CIRCLES: dict[str, Callable[[DistributedDataParallel], Trainer | None]] = {
    "nothing": lambda ddp: None,
    "submodule": _in_module,
    "attribute": _beside_module,
    "state": _in_state,
    "hook": _in_hook,
}


@pytest.mark.parametrize("name", CIRCLES)
@on_ranks(2)
def test_wrapper_in_a_circle_is_freed(rank: int, world: int, name: str) -> None:
    def use() -> list[weakref.ref[Any]]:
        ddp = DistributedDataParallel(build(), message_size=20)
        trainer = CIRCLES[name](ddp)
        for _ in range(3):
            check_step_of(ddp)
        if trainer is not None:
            check(trainer.buckets > 2, f"{trainer.buckets} buckets")
        return [weakref.ref(o) for o in (ddp, ddp.module, ddp.module.layers[0].weight)]

    def check_step_of(ddp: DistributedDataParallel) -> None:
        ddp.zero_grad()
        _loss(ddp, rank).backward()

    references = use()
    gc.collect()
    check_equal([r() is None for r in references], [True] * 3, "wrapper, module, parameter freed")
    check_step(DistributedDataParallel(build()), _loss, "the next wrapper")


@pytest.mark.parametrize("what", ["hook", "neither"])
@on_ranks(2)
def test_backward_after_the_wrapper_with_a_hook_was_deleted_raises(
    rank: int, world: int, what: str
) -> None:
    # not the group of other tests, because the hook fails it
    ddp = DistributedDataParallel(build(), process_group=dist.new_group())
    _loss(ddp, rank).backward()
    if what == "hook":
        ddp.register_comm_hook(None, _averages)
    loss = _loss(ddp, rank)
    module = ddp.module
    del ddp
    gc.collect()
    if what == "neither":
        loss.backward()  # gradients are averaged
    else:
        with raises(RuntimeError, "was deleted before this backward", what):
            loss.backward()
    check_step(DistributedDataParallel(module), _loss, "wrapped again")


@on_ranks(2)
def test_a_copy_is_evaluated_by_one_rank_and_connects_in_training(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(build(), message_size=20)
    state = post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, dist.new_group(), 1000)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    check_step(ddp, _loss, "the original")
    average = torch.optim.swa_utils.AveragedModel(ddp).eval()  # its state cannot be copied
    teacher = copy.deepcopy(ddp).requires_grad_(False)
    if rank == 0:
        _loss(teacher, 0)
        with torch.no_grad():
            _loss(average, 0)
        for parameter in average.parameters():
            parameter.data.zero_()
    before = state.iter
    _loss(average, rank).backward()
    check(all(not p.any() for p in average.parameters()), "the copy has rank 0's parameters")
    check_step(average.module, _loss, "the copy")
    check_equal(state.iter, before, "steps of a hook, which a copy does not have")
    check_step(ddp, _loss, "the original again")
