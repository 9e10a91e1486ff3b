# SPDX-License-Identifier: BSD-3-Clause
"""Low-precision types, casting modules to them, and parameters of one type."""

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
    """Those of the parameters that have a gradient, by device, type and gradient type."""
    kinds: dict[Any, list[Any]] = {}
    for param in params:
        if param.grad is not None:
            kinds.setdefault((param.device, param.dtype, param.grad.dtype), []).append(param)
    return list(kinds.values())


def convert_module(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast floating parameters, their gradients and buffers of `module` itself to `dtype`.

    In place; children are left alone, parameters and buffers keep their identity: other modules may
    hold them, too.
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
    """:func:`convert_module` for all of `network`, but for affine batch norm if `keep_batchnorm`.

    Weights of recurrent modules are laid out contiguously again.
    """
    for module in network.modules():
        if keep_batchnorm and isinstance(module, _BatchNorm) and module.affine:
            continue
        convert_module(module, dtype)
        if isinstance(module, torch.nn.RNNBase):
            module.flatten_parameters()
