# SPDX-License-Identifier: BSD-3-Clause
"""The wrapper's interface to torch.compile, which splits graphs by bucket.

Note [Compiled graphs are split by bucket]

The backward of a compiled graph is one autograd node, whose gradients are all available only at its
end. No communication could start before that. So torch's compiler splits a graph by the sizes of
its parameters if it compiles during the forward of torch's wrapper. It finds the wrapper in a class
attribute, and reads the wrapper's ``bucket_bytes_cap``. Our wrapper sets this attribute while it
calls its module. The interface is internal to torch and may change. Without it, compiled modules
still train, but communication starts when a graph's backward ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from apex.parallel import _options

_CPU_BUCKET_BYTES = 8 << 20
_FIRST_BUCKET_BYTES = 1 << 20  # torch's default for the first bucket


class _NotAsked:
    """Stores the wrapper in forward if torch's compiler has no such attribute."""

    _active_ddp_module: Any = None


def _find_registry(candidate: Any = nn.parallel.DistributedDataParallel) -> Any:
    names = ("_active_ddp_module", "_get_active_ddp_module")
    return candidate if all(hasattr(candidate, name) for name in names) else _NotAsked


# Setting the attribute costs less than checking whether anything is compiled, and a script may
# compile for the first time within a forward.
registry = _find_registry()


class _Active(threading.local):
    """The wrapper whose forward runs in this thread. The registry has one for all threads."""

    wrapper: Any = None


active = _Active()


def splits_graphs() -> bool:
    """Whether this torch version has the interface that splitting needs."""
    return registry is not _NotAsked


def bucket_bytes(
    parameters: Iterable[nn.Parameter], message_size: int, bucket_cap_mb: float | None
) -> int:
    """The bucket size in bytes, for the compiler. It is at least the size of the compiler's first
    bucket; for a smaller size the compiler raises."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    elements = _options.given_elements(message_size)
    if bucket_cap_mb is not None:
        cap = int(bucket_cap_mb * (1 << 20))
    elif elements is None and all(parameter.device.type == "cpu" for parameter in trainable):
        cap = _CPU_BUCKET_BYTES
    else:
        held = sum(parameter.numel() for parameter in trainable)
        held_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trainable)
        cap = (elements or _options.MESSAGE_SIZE) * held_bytes // max(1, held)
    return max(cap, getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", _FIRST_BUCKET_BYTES))
