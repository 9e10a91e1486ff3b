# SPDX-License-Identifier: BSD-3-Clause
"""The inner tensors of wrapper subclasses, which have no memory of their own."""

from __future__ import annotations

import sys
from typing import Any

import torch

from apex import _core

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper subclass names in ``__tensor_flatten__``; empty if it has none.

    Raises:
        ValueError: for a DTensor.
    """
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        # The local tensor may be one of several shards, which another rank's shard must not
        # overwrite.
        raise ValueError(
            "it is a DTensor: call torch.distributed.tensor.parallel.ddp._pre_dp_module_transform"
            "(module), as for torch's class"
        )
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    names, _ = flatten()
    return [part for part in (getattr(tensor, name) for name in names) if part is not None]


def with_memory(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Replace each wrapper subclass by the inner tensors that hold its values, where known.

    The number of communicated bytes is then the number of bytes that the tensors store.
    """
    return tensors if all(type(t) in _PLAIN for t in tensors) else _core.tensor_parts(tensors)


_core.set_tensor_parts(parts)
