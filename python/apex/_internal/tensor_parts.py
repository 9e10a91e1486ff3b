# SPDX-License-Identifier: BSD-3-Clause
"""The inner tensors of tensor subclasses that have no memory of their own."""

from __future__ import annotations

import sys
from typing import Any

import torch

from apex import _core

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper subclass names in ``__tensor_flatten__``; none if it has not that.

    Raises:
        ValueError: for a DTensor.
    """
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        # Its local tensor may be one shard of several, which another rank's must not overwrite.
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
    """In place of each wrapper subclass the tensors that hold its values, as far as they are known.

    What is sent for a tensor then has the size that it seems to have.
    """
    return tensors if all(type(t) in _PLAIN for t in tensors) else _core.tensor_parts(tensors)


_core.set_tensor_parts(parts)
