# SPDX-License-Identifier: BSD-3-Clause
"""What torch.compile is told by the wrapper: where to split a graph, so that its backward is
split, too.

Note [Compiled graphs are split by bucket]

The backward of a compiled graph is one autograd node, whose gradients all come out at its end:
nothing could be sent before. So torch's compiler splits a graph by the sizes of its parameters if,
while it compiles, a wrapper of torch's class is in its forward; it asks the class for that wrapper,
and the wrapper for ``bucket_bytes_cap``. Our wrapper puts itself there while it calls its module.
That is an interface of torch's own parts, without a promise: where it is missing, compiled modules
train as well, and what they have to send is sent when a graph's backward ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from apex.parallel import _options


class _NotAsked:
    """Holds the wrapper in forward where torch's compiler has no place for it."""

    _active_ddp_module: Any = None


def _find_registry(candidate: Any = nn.parallel.DistributedDataParallel) -> Any:
    names = ("_active_ddp_module", "_get_active_ddp_module")
    return candidate if all(hasattr(candidate, name) for name in names) else _NotAsked


# Assigning to its attribute costs less than asking whether anything is compiled, and a script may
# compile for the first time within a forward.
registry = _find_registry()


def splits_graphs() -> bool:
    """Whether this torch has the interface that splitting needs."""
    return registry is not _NotAsked


def bucket_bytes(
    parameters: Iterable[nn.Parameter], message_size: int, bucket_cap_mb: float | None
) -> int:
    """The size of a bucket in bytes, for the compiler, which refuses less than its first
    bucket's."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    elements = _options.given_elements(message_size)
    if bucket_cap_mb is not None:
        cap = int(bucket_cap_mb * (1 << 20))
    elif elements is None and all(parameter.device.type == "cpu" for parameter in trainable):
        cap = _options.CPU_BUCKET_BYTES
    else:
        held = sum(parameter.numel() for parameter in trainable)
        held_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trainable)
        cap = (elements or _options.MESSAGE_SIZE) * held_bytes // max(1, held)
    return max(cap, getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", _options.FIRST_BUCKET_BYTES))
