# SPDX-License-Identifier: BSD-3-Clause
"""Low-precision dtypes, casts of modules to them, and parameters grouped by dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

LOW_PRECISION_DTYPES = (torch.float16, torch.bfloat16)


def is_low_precision(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is float16 or bfloat16."""
    return tensor.dtype in LOW_PRECISION_DTYPES


def alike(params: Iterable[Any]) -> list[list[Any]]:
    """The parameters that have a gradient, grouped by device, dtype and gradient dtype."""
    kinds: dict[Any, list[Any]] = {}
    for param in params:
        if param.grad is not None:
            kinds.setdefault((param.device, param.dtype, param.grad.dtype), []).append(param)
    return list(kinds.values())


def convert_module(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters, their gradients and buffers of `module` itself to `dtype`.

    The cast is in place. Child modules are not changed. Parameters and buffers keep their identity,
    because other modules may share them.
    """
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            param.data = param.data.to(dtype)
            if param.grad is not None:
                param.grad.data = param.grad.data.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_modules(network: torch.nn.Module, dtype: torch.dtype, keep_batchnorm: bool) -> None:
    """Apply :func:`convert_module` to all of `network`.

    With `keep_batchnorm`, affine batch norms are left as they are. The weights of recurrent modules
    are made contiguous again.
    """
    for module in network.modules():
        if keep_batchnorm and isinstance(module, _BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()
