# SPDX-License-Identifier: BSD-3-Clause
"""Splits lists of tensors by type. Names of Apex's ``distributed`` module that scripts use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from apex._internal.flat import flatten, unflatten


def split_by_type(tensors: Sequence[Tensor]) -> OrderedDict[str, list[Tensor]]:
    """The tensors by ``tensor.type()``, in order of first appearance."""
    buckets: OrderedDict[str, list[Tensor]] = OrderedDict()
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets


def split_half_float_double(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lists of the float16, float32, float64 and bfloat16 tensors, without empty lists.

    Accepts any device. Apex's function dropped bfloat16 and tensors outside of CUDA devices.
    """
    kinds = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
    buckets = [[tensor for tensor in tensors if tensor.dtype == kind] for kind in kinds]
    return [bucket for bucket in buckets if bucket]


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Append the tensors in `maybe_tensor`, which may be a nested iterable, to `tensor_list`."""
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
        return
    if isinstance(maybe_tensor, (str, bytes)):
        return
    try:
        items = list(maybe_tensor)
    except TypeError:
        return
    for item in items:
        extract_tensors(item, tensor_list)


@torch.no_grad()
def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run ``call(flat, *extra_args)`` on one flat tensor of tensors of one dtype and device.

    The results are copied back. After ``torch.distributed.all_reduce`` they are divided by the
    number of processes.
    """
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    torch._foreach_copy_(list(bucket), list(unflatten(flat, bucket)))
