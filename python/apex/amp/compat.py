# SPDX-License-Identifier: BSD-3-Clause
"""Questions about tensors that scripts for early versions of torch ask."""

from __future__ import annotations

from typing import Any

import torch


def variable_is_tensor() -> bool:
    """Whether a Variable is a Tensor: it is, since torch 0.4."""
    return True


def tensor_is_variable() -> bool:
    """Whether the type of a new Tensor is Variable: it is not."""
    return False


def tensor_is_float_tensor() -> bool:
    """Whether the type of a new Tensor is FloatTensor: it is not, since torch 0.4."""
    return False


def is_tensor_like(x: Any) -> bool:
    """Whether `x` is a tensor."""
    return isinstance(x, torch.Tensor)


def is_floating_point(x: Any) -> bool:
    """Whether `x` is a tensor of a floating type."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def scalar_python_val(x: Any) -> Any:
    """The number in a tensor of one element (waits for its device), or the first item of `x`."""
    return x.item() if hasattr(x, "item") else x[0]


def filter_attrs(module: Any, attrs: Any) -> list[str]:
    """Those of the names `attrs` that `module` has."""
    return [name for name in attrs if hasattr(module, name)]
