# SPDX-License-Identifier: BSD-3-Clause
"""Lists of tensors as one flat tensor, and back: Apex's ``apex_C``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(bucket: Sequence[Tensor]) -> Tensor:
    """A new tensor, ``[elements]``, of the elements of all tensors in their order.

    Tensors of one type and device.
    """
    return torch.cat([tensor.detach().reshape(-1) for tensor in bucket])


def unflatten(coalesced: Tensor, bucket: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of the beginning of `coalesced`, ``[elements]``, with the shapes of `bucket`."""
    views, offset = [], 0
    for tensor in bucket:
        views.append(coalesced[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
    return tuple(views)
