# SPDX-License-Identifier: BSD-3-Clause
"""Process groups: finding them, naming them for the engine, and ending them."""

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


def world_group() -> dist.ProcessGroup:
    """The default group, which is there as soon as torch.distributed is initialized."""
    return cast(dist.ProcessGroup, dist.group.WORLD)


#: The groups that a fork has copied into this process: it is no rank of them.
_of_parent: list[Any] = []


def _forked() -> None:
    if dist.is_initialized():
        _of_parent.extend(getattr(dist.distributed_c10d._world, "pg_map", ()))


os.register_at_fork(after_in_child=_forked)


def require_group(process_group: dist.ProcessGroup | None, who: str) -> dist.ProcessGroup:
    """Return ``process_group`` or the default group.

    Raises:
        RuntimeError: if torch.distributed is not initialized, or this process is not in the group.
    """
    # Before anything is asked of it: the child has none of its threads, and would wait for them.
    if any((process_group or dist.group.WORLD) is group for group in _of_parent):
        raise RuntimeError(
            f"{who}: this process was forked from the one that made the communicator, and is no "
            "rank of it: make process groups and wrappers after the fork."
        )
    if not dist.is_initialized():
        raise RuntimeError(
            f"{who} needs a process group: call torch.distributed.init_process_group() first "
            "(scripts started by torchrun or apex.parallel.multiproc need no arguments but the "
            "backend; a single process may use "
            'init_process_group("gloo", init_method="tcp://localhost:29500", rank=0, '
            "world_size=1))."
        )
    if process_group is None:
        return world_group()
    not_a_member: object = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() returns there
    if process_group is not_a_member:
        raise RuntimeError(
            f"{who}: rank {dist.get_rank()} is not a member of the process group it was given; "
            "construct it only on the ranks that are."
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"{who}: process_group is what torch.distributed.new_group() returns, got "
            f"{type(process_group).__name__}."
        )
    return process_group


def backends_of(group: dist.ProcessGroup) -> str:
    """The names of its backends; empty for one that is written in Python, which has none."""
    try:
        return str(dist.get_backend_config(group))
    except (KeyError, TypeError, ValueError):  # torch.distributed does not know it
        return ""


def ranks_of(group: dist.ProcessGroup | None) -> Any:
    """Equal for groups over the same ranks; for one that is written in Python, the group itself."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return group


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors have to be for a collective of ``group``."""
    if "nccl" in backends_of(group) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """The timeout of a group's collectives; None, the default, if its backend does not tell."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: datetime.timedelta = options._timeout
            return timeout
    return None


# Note [Who holds a process group at exit]
#
# Gloo's threads end with the last reference to their group. A process that runs its static
# destructors while they are alive aborts now and then ("terminate called without an active
# exception"). References that outlive the script:
# - the graph of a loss that is still held: its hooks hold the reducer, which holds its groups;
# - wrappers in global variables, which the interpreter may clear after c10d's own state;
# - default arguments in torch.distributed.nn.functional (``group=group.WORLD``), if that module is
#   first imported after init_process_group(), as it is by torch._dynamo, as that is by every
#   optimizer. It is imported above so that this file, normally imported first, leaves no group in
#   them.
_in_use = False
_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def end_groups_at_exit(holder: Any = None) -> None:
    """Destroy the process groups when the interpreter exits, if the script does not.

    Scripts written for NVIDIA's Apex never end their groups. NCCL's are left to torch, which may
    have to wait for other ranks to end them. ``holder``, if given, keeps process groups in its
    attributes ``process_group``, ``groups`` and ``reducer``; it lets go of them then.
    """
    global _in_use
    _in_use = True
    if holder is not None:
        _holders.add(holder)


@atexit.register  # now, so that it runs after the handlers of a script, which may use its groups
def _end_groups() -> None:
    if not _in_use:
        return
    _core.Reducer.release_all()
    for holder in list(_holders):
        for name in ("reducer", "groups", "process_group"):
            if name in holder.__dict__:
                holder.__dict__[name] = None
    _forget_default_groups()
    if dist.is_initialized() and "gloo" in str(dist.get_backend_config()):
        with contextlib.suppress(Exception):  # the process is ending; its result is not at stake
            dist.destroy_process_group()


def _forget_default_groups() -> None:
    for function in vars(dist_functional).values():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(isinstance(value, dist.ProcessGroup) for value in defaults):
            function.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in defaults
            )
