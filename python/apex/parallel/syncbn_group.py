# SPDX-License-Identifier: BSD-3-Clause
"""The process groups of synchronized batch norm."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch.distributed as dist

from apex import _core
from apex._internal.group_names import name_of, register
from apex._internal.groups import (
    end_groups_at_exit,
    group_of_all_ranks,
    require_own_process,
    split_world,
    world_group,
)

_lock = threading.Lock()
_world: weakref.ref[Any] | None = None
_own_group: weakref.ref[Any] | None = None  # weak: a group ends with its last reference


def default_group() -> Any:
    """A separate group of all ranks, shared by every ``SyncBatchNorm``.

    Its collectives never queue behind those of gradient buckets. None without a default group or
    with one rank. It has the default group's backend and timeout, and is created again if the
    default group was. That is collective, and blocks. So it happens in the first training forward:
    one rank alone can build a model for evaluation. Thread safe.
    """
    global _world, _own_group
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = world_group()
    if world.size() == 1:
        return None
    require_own_process(world, "SyncBatchNorm")
    with _lock:
        group = _own_group() if _own_group is not None else None
        if group is None or _world is None or _world() is not world:
            group = group_of_all_ranks("apex_sync_batch_norm")
            # torch reuses its names after destroy_process_group(), and a compiled graph stores one
            register(group)
            _own_group, _world = weakref.ref(group), weakref.ref(world)
            end_groups_at_exit()
        return group


def default_group_name() -> str:
    """The name of :func:`default_group`; empty if there is none."""
    group = default_group()
    return "" if group is None else name_of(group)


# torch.compile calls this function while it traces (its graph stores the name, as for any group),
# instead of tracing the creation of a group. The public decorator for this,
# torch.compiler.assume_constant_result, sets this attribute but imports the whole compiler.
default_group_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def group_name_of(group: Any) -> str | None:
    """The name under which operators find ``group``; None means the default communicator. Raises
    ValueError on a rank that is not a member."""
    if group is None:
        return None
    if group == dist.GroupMember.NON_GROUP_MEMBER or not hasattr(group, "size"):
        raise ValueError(
            "SyncBatchNorm: this rank is not a member of its process_group; pass each rank the "
            "group it belongs to (apex.parallel.create_syncbn_process_group returns it)."
        )
    return "" if group.size() == 1 else name_of(group)


def create_syncbn_process_group(group_size: int) -> Any:
    """Split the ranks into groups of ``group_size`` consecutive ranks; return this rank's group.

    Collective: every rank of the default group calls it with the same number. ``0`` returns None,
    which means all ranks. The groups have the timeout of the default group.

    Raises ValueError if the world size is not a multiple of ``group_size``, and RuntimeError if the
    ranks pass different sizes.
    """
    if group_size == 0:
        return None
    require_own_process(world_group(), "create_syncbn_process_group")
    world_size = dist.get_world_size()
    if group_size < 0 or group_size > world_size or world_size % group_size != 0:
        raise ValueError(
            f"create_syncbn_process_group: {world_size} ranks cannot be split into groups of "
            f"{group_size}; choose a group_size that divides the world size."
        )
    said = [f"group_size={group_size} in create_syncbn_process_group"]
    _core.verify_same_model([], [], said, name_of(world_group()))
    parts = [list(range(i, i + group_size)) for i in range(0, world_size, group_size)]
    group = split_world(parts)
    end_groups_at_exit()
    return group
