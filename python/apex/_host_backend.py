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
    """Create the backend on one rank of a new group. torch.distributed calls this; it blocks until
    all ranks have called it."""
    registry: Any = torch._C._distributed_c10d
    # A temporary named process group passes the store and the backend to C++ and back.
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
    """Register the backend with torch.distributed. Further calls do nothing."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
