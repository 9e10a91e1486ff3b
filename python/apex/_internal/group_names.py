# SPDX-License-Identifier: BSD-3-Clause
"""Maps process groups of Python to names under which the engine finds them."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
import torch.distributed as dist

from apex._internal.untraced import outside_traces

# The registered name of each group. Weak, so that this table does not keep a group alive.
_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def name_of(group: dist.ProcessGroup) -> str:
    """The name by which the engine finds ``group`` in c10d's registry.

    An operator takes the group as an argument once and registers it in C++ if its name is unknown
    to c10d or belongs to another group (as with backends of torchcomms). A destroyed group is not
    registered again; the engine reports that it is missing. A subclass of ``ProcessGroup`` written
    in Python need not be known to torch.distributed; it stays registered for its lifetime.
    """
    name = _names.get(group)
    if name is not None:
        return name
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return group.group_name if type(group) is dist.ProcessGroup else register(group)
    with outside_traces():  # torch.jit.trace cannot record a group as a value
        registered: str = torch.ops.apex.process_group_name(group.boxed())
    _names[group] = registered
    return registered


def register(group: dist.ProcessGroup) -> str:
    """Register ``group`` in c10d's registry, where C++ looks it up, under a name that this process
    never uses again. The name ends with the group.

    For groups written in Python, the operator above cannot do this. C++ sees an object whose
    methods call Python, and the class may define methods of the same name itself.
    """
    registry: Any = torch._C._distributed_c10d
    name = f"apex/{next(_numbers)}"
    registry._register_process_group(name, group)
    weakref.finalize(group, _unregister, name).atexit = False
    _names[group] = name
    return name


def _unregister(name: Any) -> None:
    torch._C._distributed_c10d._unregister_process_group(name)
