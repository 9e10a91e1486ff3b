# SPDX-License-Identifier: BSD-3-Clause
"""Registers the c10d backend ``apex``: ``torch.distributed.init_process_group("apex")``."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from apex import _core

NAME = "apex"
_numbers = itertools.count()


def _create(options: Any, _: Any) -> Any:
    """What torch.distributed calls, on each rank of a new group; blocks until all have come."""
    registry: Any = torch._C._distributed_c10d
    # The store and the backend cross the boundary in a group, which has a name meanwhile.
    group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    name = f"apex/backend/{next(_numbers)}"
    registry._register_process_group(name, group)
    try:
        _core.add_host_backend(
            name,
            max(1, round(options.timeout.total_seconds() * 1000)),
            options.group_id,
            list(options.global_ranks_in_group),
        )
        return group._get_backend(torch.device("cpu"))
    finally:
        registry._unregister_process_group(name)


def register() -> None:
    """Makes the backend known to torch.distributed, once."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
