# SPDX-License-Identifier: BSD-3-Clause
"""Collectives of Python objects, with and without NumPy."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ddp_support import RankPool, check, check_equal, raises
from torch import Tensor

from apex._internal.groups import world_group
from apex._internal.objects import all_gather_object, gather_object
from apex.optimizers import ShardedOptimizer

pytestmark = pytest.mark.processes


def _no_numpy(*_: Any) -> Any:
    raise RuntimeError("Numpy is not available")


def _gather(rank: int, world: int) -> tuple[list[Any], list[Any]]:
    with mock.patch.object(Tensor, "numpy", _no_numpy):
        everything = all_gather_object({"rank": rank, "text": "é" * 100 * rank})
        pair = dist.new_group([0, 2])
        return everything, all_gather_object((rank, None), pair) if rank != 1 else []


def test_objects_of_different_sizes_reach_every_rank_without_numpy(ranks: RankPool) -> None:
    everything = [{"rank": rank, "text": "é" * 100 * rank} for rank in range(3)]
    pair = [(0, None), (2, None)]
    assert ranks.run(3, _gather) == [(everything, pair), (everything, []), (everything, pair)]


def _on_one(rank: int, world: int) -> None:
    with mock.patch.object(Tensor, "numpy", _no_numpy):
        pair = dist.new_group([0, 2])
        if rank != 1:
            found = gather_object("é" * (1 + 50 * rank), 1, pair)
            check_equal(found, ["é", "é" * 101] if rank == 2 else None, "objects")
        model = torch.nn.Linear(8, 4096)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW)
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        optimizer.consolidate_state_dict(to=1)
        if rank == 1:
            state = optimizer.state_dict()["state"]
            check(bool((state[0]["exp_avg"] != 0).all()), "a part is missing")


def test_objects_reach_one_rank_without_numpy(ranks: RankPool) -> None:
    ranks.run(3, _on_one)


class _Refuses:
    def __reduce__(self) -> Any:
        raise ValueError("not to be pickled")


def _one_cannot_pickle(rank: int, world: int) -> None:
    value = _Refuses() if rank == 1 else rank
    for gather in (all_gather_object, lambda one: gather_object(one, 0, world_group())):
        if rank == 1:
            with raises(ValueError, "not to be pickled"):
                gather(value)
        else:
            with raises(RuntimeError, "rank 1 could not pickle what it was to send"):
                gather(value)
    check_equal(all_gather_object(rank), list(range(world)), "the group still works")


def test_rank_that_cannot_pickle_raises_on_every_rank(ranks: RankPool) -> None:
    ranks.run(3, _one_cannot_pickle)
