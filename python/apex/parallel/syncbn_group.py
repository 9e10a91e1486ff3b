# SPDX-License-Identifier: BSD-3-Clause
"""The process groups that synchronized batch norm talks over."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch.distributed as dist

from apex._internal.group_names import name_of
from apex._internal.groups import (
    end_groups_at_exit,
    group_of_all_ranks,
    require_own_process,
    split_evenly,
    world_group,
)

_lock = threading.Lock()
_world: weakref.ref[Any] | None = None
_own_group: weakref.ref[Any] | None = None  # weak: a group ends with its last reference


def default_group() -> Any:
    """A group of all ranks, apart from the default one, shared by every ``SyncBatchNorm``.

    Its collectives never queue behind those of gradient buckets. It is made by the first call
    after ``init_process_group`` that finds more than one rank, with the default group's backend
    and timeout, and made again when the default group has been. None without a default group or
    with one rank.

    The call that makes it is collective: every rank has to come. That is why it happens in the
    first training forward, which every rank has to run in any case, and not when a module is
    constructed or converted: a model that only one rank builds, to evaluate it, hangs nobody.
    Blocks the host when it makes the group. Thread safe.
    """
    global _world, _own_group
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    world = world_group()
    require_own_process(world, "SyncBatchNorm")
    with _lock:
        group = _own_group() if _own_group is not None else None
        if group is None or _world is None or _world() is not world:
            group = group_of_all_ranks("apex_sync_batch_norm")
            _own_group, _world = weakref.ref(group), weakref.ref(world)
            end_groups_at_exit()
        return group


def default_group_name() -> str:
    """The name of :func:`default_group`; empty where there is none."""
    group = default_group()
    return "" if group is None else name_of(group)


# torch.compile calls this function while it traces (its graph keeps the name, as it keeps the name
# of any group), instead of tracing the making of a group. The public decorator for it,
# torch.compiler.assume_constant_result, sets this attribute but imports the whole compiler.
default_group_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def group_name_of(group: Any) -> str | None:
    """The name the operators know ``group`` by; None stands for the default communicator.

    Raises ValueError on a rank that is not a member of the group.
    """
    if group is None:
        return None
    if group == dist.GroupMember.NON_GROUP_MEMBER or not hasattr(group, "size"):
        raise ValueError(
            "SyncBatchNorm: this rank is not a member of the process_group it was given; pass each "
            "rank the group it belongs to (apex.parallel.create_syncbn_process_group returns it)."
        )
    return "" if group.size() == 1 else name_of(group)


def create_syncbn_process_group(group_size: int) -> Any:
    """Split the ranks into groups of ``group_size`` consecutive ones; returns this rank's group.

    Collective: every rank of the default group calls it with the same number. ``0`` returns None,
    which stands for all ranks. The groups have the timeout of the default group.

    Raises ValueError if the world is not a multiple of ``group_size``.
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
    group = split_evenly(group_size)
    end_groups_at_exit()
    return group
