# SPDX-License-Identifier: BSD-3-Clause
"""Find, name and destroy process groups."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import weakref
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional

from apex import _core
from apex._internal.group_names import name_of
from apex._internal.untraced import outside_traces


def world_group() -> dist.ProcessGroup:
    """The default group, which exists once torch.distributed is initialized."""
    return cast(dist.ProcessGroup, dist.group.WORLD)


#: Groups that a fork copied into this process. This process is not a rank of them.
_of_parent: list[Any] = []


def _forked() -> None:
    if dist.is_initialized():
        _of_parent.extend(getattr(dist.distributed_c10d._world, "pg_map", ()))


os.register_at_fork(after_in_child=_forked)


def require_own_process(group: Any, who: str) -> None:
    """Raise RuntimeError if this process was forked after ``group`` was created."""
    if any(group is one for one in _of_parent):
        raise RuntimeError(
            f"{who}: this process was forked from the process that created the communicator, so it "
            "is not a rank of it: create process groups and wrappers after the fork."
        )


def require_group(process_group: dist.ProcessGroup | None, who: str) -> dist.ProcessGroup:
    """Return ``process_group`` or the default group.

    Raises RuntimeError without an initialized torch.distributed, or if this process is no member.
    """
    # This comes first: a forked child has none of the group's threads, and would wait for them.
    require_own_process(process_group or dist.group.WORLD, who)
    if not dist.is_initialized():
        raise RuntimeError(
            f"{who} needs a process group: call torch.distributed.init_process_group() first "
            "(without arguments but the backend under torchrun or apex.parallel.multiproc; a "
            'single process may use init_process_group("gloo", init_method='
            '"tcp://localhost:29500", rank=0, world_size=1)).'
        )
    if process_group is None:
        return world_group()
    # what new_group() returns to non-members
    not_a_member: object = dist.GroupMember.NON_GROUP_MEMBER
    if process_group is not_a_member:
        raise RuntimeError(
            f"{who}: rank {dist.get_rank()} is not a member of its process group; construct it "
            "only on the members."
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"{who}: process_group must be a process group, as torch.distributed.new_group() "
            f"returns it, got {type(process_group).__name__}."
        )
    return process_group


def backends_of(group: dist.ProcessGroup) -> str:
    """The group's backend configuration; empty for a group written in Python, which has none."""
    try:
        return str(dist.get_backend_config(group))
    except (KeyError, TypeError, ValueError):  # torch.distributed does not know it
        return ""


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves tensors on ``device``; empty if none does."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:  # no backend for that device, or a group written in Python
        return ""


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """The timeout of a group's collectives; None, the default, if its backend reports none."""
    for device in group._device_types:
        if backend_name(group, device) == "apex":  # torch does not expose its options in Python
            return datetime.timedelta(milliseconds=_core.host_backend_timeout(group.group_name))
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: datetime.timedelta = options._timeout
            return timeout
    return None


# Note [Communicators that are split]
#
# If the default group is bound to a device (``init_process_group(device_id=...)``), torch creates
# new NCCL communicators by ncclCommSplit. This has two requirements:
# - All ranks of the parent communicator must call it. ``new_group()`` splits the default group's
#   communicator, also with ``use_local_synchronization=True``. If only the members of a subgroup
#   called it, they would wait for all other ranks. ``split_group()`` splits any group's.
# - No collective may be outstanding on the parent, on any rank. The broadcast of the parameters may
#   be, because NCCL's collectives do not block the host.


def _splitting_device(group: dist.ProcessGroup) -> torch.device | None:
    """The device whose communicator torch splits to create a group like ``group``, or None."""
    device: torch.device | None = world_group().bound_device_id
    if device is None or not torch.accelerator.is_available():
        return None
    try:
        backend: Any = group._get_backend(device)
    except RuntimeError:
        return None
    return device if backend.supports_splitting else None


def _meet(group: dist.ProcessGroup, device: torch.device | None) -> list[int]:
    """Prepare the creation of a group by the ranks of ``group``. Return the number of groups of
    which each rank is a member.

    Raises for a lost rank. torch would wait for it in its store until the timeout, and not name it.
    Blocks the host until ``device`` is idle, before its communicator is split.
    """
    with outside_traces():
        place = dist.distributed_c10d._get_object_coll_device(group)
        counts = torch.zeros(group.size(), dtype=torch.int64, device=place)
        counts[group.rank()] = len(dist.distributed_c10d._world.pg_names)
        _core.all_reduce(counts, name_of(group), average=False)
    if device is not None:
        torch.accelerator.synchronize(device)
    return list(counts.tolist())


def _new_group(ranks: list[int], like: dist.ProcessGroup, local: bool = False) -> Any:
    """``new_group()`` with the backends and the timeout of ``like``.

    ``local``: only ``ranks`` call it, not all ranks.
    """
    own = dist.get_backend_config(like)
    new_group: Any = dist.new_group
    return new_group(
        ranks,
        use_local_synchronization=local,
        timeout=timeout_of(like),
        backend=None if own == dist.get_backend_config() else own,
    )


def _split(
    group: dist.ProcessGroup, parts: list[list[int]], device: torch.device | None
) -> Any | None:
    """This rank's part of ``group``, by one split of the communicator on ``device``.

    None without a device, and with several backends: torch would pass NCCL's options to Gloo.
    """
    if device is None or len({backend_name(group, one) for one in group._device_types}) > 1:
        return None
    split_group: Any = dist.split_group
    return split_group(group, parts, timeout=timeout_of(group))


def group_like(group: dist.ProcessGroup) -> Any:
    """Create another group over the ranks of ``group``, with its backends and timeout.

    Collective over exactly these ranks. Blocks the host until the device is idle if the
    communicator is split; see Note [Communicators that are split].
    """
    device = _splitting_device(group)
    counts = _meet(group, device)
    made = _split(group, [list(range(group.size()))], device)
    if made is not None:
        return made
    ranks = dist.get_process_group_ranks(group)
    local = len(ranks) < world_group().size()
    # torch names such a group by its number of groups, so ranks would wait under different names.
    if local and (device is not None or len(set(counts)) > 1):
        raise ValueError(
            "num_allreduce_streams > 1: the ranks of process_group belong to different numbers of "
            f"process groups ({', '.join(map(str, counts))}), by which torch names new groups, or "
            "NCCL is bound to a device and not its only backend: use num_allreduce_streams=1, or "
            "groups that do not overlap."
        )
    return _new_group(ranks, group, local)


def group_of_all_ranks(description: str) -> Any:
    """Create another group over all ranks, with the default group's backends and timeout.

    Collective. Blocks the host as :func:`group_like` does.
    """
    world = world_group()
    _meet(world, _splitting_device(world))
    made: Any = dist.new_group(timeout=timeout_of(world), group_desc=description)
    return made


def split_world(parts: list[list[int]]) -> Any:
    """Split the default group into groups of these ranks; return this rank's group.

    Collective. Blocks the host as :func:`group_like` does.
    """
    world = world_group()
    device = _splitting_device(world)
    _meet(world, device)
    made = _split(world, parts, device)
    if made is not None:
        return made
    groups = [_new_group(ranks, world) for ranks in parts]
    return next(group for group, ranks in zip(groups, parts, strict=True) if world.rank() in ranks)


# Note [Who holds a process group at exit]
#
# The threads of a Gloo group end with the last reference to it. If a process runs its static
# destructors while these threads are alive, it sometimes aborts ("terminate called without an
# active exception"). References that outlive the script:
# - The graph of a loss that is still referenced. Its hooks hold the reducer, which holds its
#   groups.
# - Wrappers in global variables, which the interpreter may clear after c10d's own state.
# - Default arguments in torch.distributed.nn.functional: the default group, if that module is
#   first imported after init_process_group(). Every optimizer imports torch._dynamo, which imports
#   it. This file imports it above, and is normally imported first, so the defaults hold no group.
_in_use = False
_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def end_groups_at_exit(holder: Any = None) -> None:
    """Destroy the process groups when the interpreter exits, if the script did not, as scripts for
    NVIDIA's Apex do not. NCCL groups are left to torch: destroying them may wait for other ranks.

    Attributes ``process_group``, ``groups``, ``reducer`` and ``core`` of ``holder`` are dropped.
    """
    global _in_use
    _in_use = True
    if holder is not None:
        _holders.add(holder)


# registered now, to run after the handlers of the script, which may use its groups
@atexit.register
def _end_groups() -> None:
    if _in_use:
        _core.Reducer.release_all()
        for holder in list(_holders):
            for name in ("reducer", "core", "groups", "process_group"):
                if name in holder.__dict__:
                    holder.__dict__[name] = None
        _forget_default_groups()
    config = str(dist.get_backend_config()) if dist.is_initialized() else ""
    if "apex" in config or (_in_use and "gloo" in config):
        with contextlib.suppress(Exception):  # the process is exiting, so errors do not matter
            dist.destroy_process_group()
    # Waits for the threads of destroyed groups, which must not outlive the interpreter.
    _core.Reducer.release_all()


def _forget_default_groups() -> None:
    for function in vars(dist_functional).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(value, dist.ProcessGroup) for value in defaults):
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in defaults
            )
