# SPDX-License-Identifier: BSD-3-Clause
"""Queries about tensors, for scripts written for early versions of torch."""

from __future__ import annotations

from typing import Any

import torch


def variable_is_tensor() -> bool:
    """Whether a Variable is a Tensor. True since torch 0.4."""
    return True


def tensor_is_variable() -> bool:
    """Whether the type of a new Tensor is Variable. Always False."""
    return False


def tensor_is_float_tensor() -> bool:
    """Whether the type of a new Tensor is FloatTensor. False since torch 0.4."""
    return False


def is_tensor_like(x: Any) -> bool:
    """Whether `x` is a tensor."""
    return isinstance(x, torch.Tensor)


def is_floating_point(x: Any) -> bool:
    """Whether `x` is a tensor of a floating-point dtype."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def scalar_python_val(x: Any) -> Any:
    """The number in a one-element tensor (waits for its device), or the first item of `x`."""
    return x.item() if hasattr(x, "item") else x[0]


def filter_attrs(module: Any, attrs: Any) -> list[str]:
    """The names in `attrs` that `module` has."""
    return [name for name in attrs if hasattr(module, name)]
