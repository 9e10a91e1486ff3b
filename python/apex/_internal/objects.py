# SPDX-License-Identifier: BSD-3-Clause
"""A collective of Python objects that works without NumPy, unlike those of torch.distributed.

NumPy is optional for torch and for this package, but torch converts the bytes that it receives by
``Tensor.numpy()``.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of `group` (default: all ranks), in their order. Collective.

    Any value that can be pickled. Ranks may give values of different sizes. Blocks the host.
    """
    device = dist.distributed_c10d._get_object_coll_device(group)
    sent = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    size = torch.tensor([sent.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(one) for one in sizes]
    padded = sent.new_zeros(max(lengths))
    padded[: sent.numel()] = sent
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded, group=group)
    on_host = [one.cpu() for one in received]
    return [
        pickle.loads(ctypes.string_at(one.data_ptr(), length))
        for one, length in zip(on_host, lengths, strict=True)
    ]
