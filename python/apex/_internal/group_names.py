# SPDX-License-Identifier: BSD-3-Clause
"""How process groups of Python become those of the engine."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist

# What the engine finds each group by. Weak: a group ends with its last reference.
_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def name_of(group: dist.ProcessGroup) -> str:
    """The name by which the engine finds ``group`` in c10d's registry.

    The group itself crosses the boundary once, as an argument of an operator, which registers it
    where c10d does not know it, or another one, by its name (as with backends of torchcomms). A
    group that was destroyed is not registered again: the engine says that it is not there. A
    subclass of ``ProcessGroup`` that is written in Python need not be known to torch.distributed at
    all; it is registered for as long as it lives.
    """
    name = _names.get(group)
    if name is not None:
        return name
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return group.group_name if type(group) is dist.ProcessGroup else _register(group)
    jit: Any = torch._C
    tracing = jit._get_tracing_state()
    jit._set_tracing_state(None)  # a group is no value of a graph of torch.jit.trace
    try:
        registered: str = torch.ops.apex.process_group_name(group.boxed())
    finally:
        jit._set_tracing_state(tracing)
    _names[group] = registered
    return registered


def _register(group: dist.ProcessGroup) -> str:
    """Gives a group that is written in Python a name in c10d's registry, which C++ asks.

    Not by an operator as above: to C++ it is an object that calls Python's methods, and the class
    may have methods of that name of its own.
    """
    registry: Any = torch._C._distributed_c10d
    name = f"apex/python/{next(_numbers)}"
    registry._register_process_group(name, group)
    weakref.finalize(group, _unregister, name).atexit = False
    _names[group] = name
    return name


def _unregister(name: Any) -> None:
    torch._C._distributed_c10d._unregister_process_group(name)
