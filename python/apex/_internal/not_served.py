# SPDX-License-Identifier: BSD-3-Clause
"""Names and options of Apex or torch that this package does not serve, and what to use instead.

``docs/compatibility.md`` shows the same table.
"""

from __future__ import annotations

from typing import NoReturn

INSTEAD = {
    "DistributedDataParallel(mixed_precision=...)": (
        "use torch.autocast, and register_builtin_comm_hook('bf16') for the communication"
    ),
    "DistributedDataParallel(shared_param=...)": (
        "remove the argument, because a parameter used in several places needs no option"
    ),
    "torch.distributed.algorithms.join.Join([DistributedDataParallel])": (
        "use `with model.join():` around the loop"
    ),
    "torch.func.functional_call(DistributedDataParallel, ...)": (
        "call it on model.module, whose gradients are averaged as well"
    ),
    "DistributedDataParallel._register_buffer_comm_hook": (
        "use broadcast_buffers=True, or reduce module.buffers() with torch.distributed after "
        "backward, on every rank"
    ),
}


def refuse(name: str, kind: type[Exception] = NotImplementedError) -> NoReturn:
    """Raise the error for `name`, a key of INSTEAD."""
    raise kind(f"{name} is not supported: {INSTEAD[name]}.")
