# SPDX-License-Identifier: BSD-3-Clause
"""Flatten lists of tensors and unflatten them again, as Apex's ``apex_C`` does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """A new tensor, ``[elements]``, with the elements of all tensors in order.

    All tensors must have the same dtype and device.
    """
    return torch.cat([tensor.detach().reshape(-1) for tensor in bucket])


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Consecutive views into `coalesced`, ``[elements]``, shaped like the tensors in `bucket`."""
    views, offset = [], 0
    for tensor in bucket:
        views.append(coalesced[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
    return tuple(views)
