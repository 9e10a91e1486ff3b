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
            return cast(datetime.timedelta, options._timeout)
    return None


# Note [Communicators that are split]
#
# If the default group is bound to a device (``init_process_group(device_id=...)``), torch creates
# new NCCL communicators by ncclCommSplit. This has two requirements:
# - All ranks of the default group must call it, also for a subgroup.
# - No collective may be outstanding on the default group, on any rank. The broadcast of the
#   parameters may be, because NCCL's collectives do not block the host.


def _meet() -> torch.device | None:
    """Prepare the creation of groups by all ranks. Return the device whose communicator is split.

    Raises for a lost rank. torch would wait for it in its store until the timeout, and not name it.
    Blocks the host until the device is idle.
    """
    world = world_group()
    with outside_traces():
        place = dist.distributed_c10d._get_object_coll_device(world)
        _core.all_reduce(torch.zeros(1, device=place), name_of(world))
    device: torch.device | None = world.bound_device_id
    if device is None or not torch.accelerator.is_available():
        return None
    try:
        backend: Any = world._get_backend(device)
    except RuntimeError:
        return None
    if not backend.supports_splitting:
        return None
    torch.accelerator.synchronize(device)
    return device


def group_of_all_ranks(description: str) -> Any:
    """Create another group over all ranks, with the default group's backends and timeout.

    Collective. Blocks the host until the device is idle if the communicator is split; see
    Note [Communicators that are split].
    """
    _meet()
    return dist.new_group(timeout=timeout_of(world_group()), group_desc=description)


def split_world(parts: list[list[int]]) -> Any:
    """Split the default group into groups of these ranks; return this rank's group.

    Collective. Blocks the host as :func:`group_of_all_ranks` does.
    """
    world = world_group()
    device, timeout = _meet(), timeout_of(world)
    backends = {backend_name(world, one) for one in world._device_types}
    if device is not None and len(backends) == 1:  # else torch passes NCCL's options to Gloo
        split_group: Any = dist.split_group
        return split_group(world, parts, timeout=timeout)
    groups: list[Any] = [dist.new_group(ranks, timeout=timeout) for ranks in parts]
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
            kept = (None if isinstance(value, dist.ProcessGroup) else value for value in defaults)
            function.__defaults__ = tuple(kept)
