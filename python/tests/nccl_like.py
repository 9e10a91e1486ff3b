# SPDX-License-Identifier: BSD-3-Clause
"""Makes torch.distributed behave as with NCCL, without a GPU: over Gloo, with NCCL's rules."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from apex.parallel import _engine


@contextlib.contextmanager
def eager_nccl() -> Iterator[list[str]]:
    """Behave as after ``init_process_group("nccl", device_id=...)``. Yields the calls to torch.

    torch then creates groups by ncclCommSplit. new_group() splits the communicator of the default
    group, so all its ranks must call it, even with use_local_synchronization=True. split_group()
    splits the communicator of a given group, for all of its ranks. No collective may be outstanding
    on the device, so the host must synchronize with the device before each split.
    """
    world: Any = dist.group.WORLD
    real_new_group = dist.new_group
    device = torch.device("cuda", 0)
    asked: list[str] = []

    def unbound(*args: Any, **kwargs: Any) -> Any:
        world.bound_device_id = None
        try:
            return real_new_group(*args, **kwargs)
        finally:
            world.bound_device_id = device

    def after_synchronization(what: str) -> None:
        if not asked or asked[-1] not in ("synchronize", "new_group"):
            raise AssertionError(f"{what} while a collective may be outstanding; before: {asked}")
        asked.append(what)

    def new_group(ranks: Any = None, use_local_synchronization: bool = False, **kwargs: Any) -> Any:
        ranks = list(range(world.size())) if ranks is None else ranks
        if use_local_synchronization and len(ranks) < world.size():
            raise AssertionError(f"ncclCommSplit of the world by {ranks} waits for all other ranks")
        after_synchronization("new_group")
        return unbound(ranks, **kwargs)

    def split_group(parent: Any, split_ranks: Any, timeout: Any = None) -> Any:
        after_synchronization(f"split_group {split_ranks}")
        dist.all_reduce(torch.zeros(1), group=parent)  # of all its ranks
        parents = dist.get_process_group_ranks(parent)
        all_ranks = [[parents[rank] for rank in ranks] for ranks in split_ranks]
        local = len(parents) < world.size()
        made = [
            unbound(ranks, use_local_synchronization=local, timeout=timeout) for ranks in all_ranks
        ]
        return next(
            group for group, ranks in zip(made, split_ranks, strict=True) if parent.rank() in ranks
        )

    with contextlib.ExitStack() as stack:
        for place, name, fake in (
            (dist, "new_group", new_group),
            (dist, "split_group", split_group),
            (torch.accelerator, "is_available", lambda: True),
            (torch.accelerator, "synchronize", lambda _: asked.append("synchronize")),
            (_engine, "over_gloo", lambda *_: False),
        ):
            stack.enter_context(unittest.mock.patch.object(place, name, fake))
        stack.callback(setattr, world, "bound_device_id", None)
        world.bound_device_id = device
        yield asked
