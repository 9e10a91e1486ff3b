# SPDX-License-Identifier: BSD-3-Clause
"""Collectives of Python objects that work without NumPy, unlike those of torch.distributed.

NumPy is optional for torch and for this package, but torch converts the bytes that it receives by
``Tensor.numpy()``.
"""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist

from apex import _core
from apex._internal.group_names import name_of


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of `group` (default: all ranks), in their order. Collective.

    Any value that can be pickled. Ranks may give values of different sizes. Blocks the host. If
    pickling fails on one rank, that rank raises its error, and the others raise RuntimeError.
    """
    sent, lengths = _padded(value, group)
    received = [torch.empty_like(sent) for _ in lengths]
    dist.all_gather(received, sent, group=group)
    return _unpickled(received, lengths)


def gather_object(value: Any, to: int, group: dist.ProcessGroup) -> list[Any] | None:
    """As :func:`all_gather_object` on rank `to` of `group`; None on the other ranks."""
    sent, lengths = _padded(value, group)
    here = dist.get_rank(group) == to
    received = [torch.empty_like(sent) for _ in lengths] if here else None
    dist.gather(sent, received, dst=dist.get_global_rank(group, to), group=group)
    return None if received is None else _unpickled(received, lengths)


def _padded(value: Any, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, list[int]]:
    """The value's bytes, padded to one length on all ranks, and the length of each rank's value."""
    device = dist.distributed_c10d._get_object_coll_device(group)
    error: BaseException | None = None
    own = torch.empty(0, dtype=torch.uint8, device=device)
    try:
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    except BaseException as raised:  # noqa: BLE001  (raised below, when the other ranks know)
        error = raised
    group = dist.distributed_c10d._get_default_group() if group is None else group
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = own.numel() if error is None else -1
    # The core's refuses a group that has failed, and reports who is late.
    _core.all_reduce(sizes, name_of(group), average=False)
    if error is not None:
        raise error
    lengths = sizes.tolist()
    if min(lengths) < 0:
        failed = lengths.index(-1)
        raise RuntimeError(f"rank {failed} could not pickle what it was to send: see its error.")
    padded = own.new_zeros(max(lengths))
    padded[: own.numel()] = own
    return padded, lengths


def _unpickled(received: list[torch.Tensor], lengths: list[int]) -> list[Any]:
    on_host = [one.cpu() for one in received]
    return [
        pickle.loads(ctypes.string_at(one.data_ptr(), length))
        for one, length in zip(on_host, lengths, strict=True)
    ]
