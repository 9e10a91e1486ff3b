# SPDX-License-Identifier: BSD-3-Clause
"""Multi-tensor operations on lists of gradients, dense and sparse."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._internal.dtypes import is_low_precision
from ..multi_tensor_apply._operations import wide_copies


def accumulate(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    """Add `grads` to the gradients of `params` in place, by one multi-tensor operation."""
    targets, addends = [], []
    for param, grad in zip(params, grads, strict=True):
        present = param.grad
        if present is None:
            param.grad = grad
        elif present.is_sparse or grad.is_sparse:
            param.grad = present + grad
        else:
            targets.append(present)
            addends.append(grad)
    if targets:
        torch._foreach_add_(targets, addends)


def dense_values(grad: torch.Tensor) -> torch.Tensor:
    """`grad`, or the values of a sparse gradient, which must be coalesced."""
    return grad._values() if grad.is_sparse else grad


def values_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The existing gradients, as dense tensors. Coalesces sparse ones."""
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.coalesce()
    return [dense_values(param.grad) for param in params if param.grad is not None]


def multiply_(grads: list[torch.Tensor], factor: float) -> None:
    """Multiply dense `grads` by a number in place, computing in float32 or wider."""
    wide = []
    for grad in grads:
        if is_low_precision(grad):  # the scale may exceed the range of its dtype
            grad.copy_(grad.float() * factor)
        else:
            wide.append(grad)
    if wide:
        torch._foreach_mul_(wide, factor)


def copies_of(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Copies of `grads`. Dense ones are copied by one multi-tensor operation."""
    dense = [grad for grad in grads if grad is not None and not grad.is_sparse]
    copies = iter(torch._foreach_mul(dense, 1.0) if dense else ())
    return [
        grad if grad is None else grad.clone().coalesce() if grad.is_sparse else next(copies)
        for grad in grads
    ]


def as_float32(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """New float32 copies. Dense gradients are copied by one multi-tensor operation."""
    if any(grad.is_sparse for grad in grads):
        return [
            grad.float().coalesce() if grad.is_sparse else grad.to(torch.float32, copy=True)
            for grad in grads
        ]
    return wide_copies(grads, torch.float32)


def round_to_grads(params: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]) -> None:
    """Set the gradients of `params` to `values`, rounded to their dtypes."""
    targets, sources = [], []
    for param, value in zip(params, values, strict=True):
        present = param.grad
        if value is None:
            param.grad = None
        elif present is None or present.is_sparse or value.is_sparse:
            param.grad = value.to(param.dtype)
        else:  # a data-parallel wrapper may hold a view of it
            targets.append(present)
            sources.append(value)
    if targets:
        torch._foreach_copy_(targets, sources)


def largest(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The largest absolute value of each of `grads`; nan if one of its values is. Does not
    block."""
    values = []
    for grad in grads:
        found = dense_values(grad.coalesce() if grad.is_sparse else grad)
        values.append(found if found.numel() else found.new_zeros(1))
    return list(torch._foreach_norm(values, float("inf"))) if values else []


def any_nonzero(values: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Whether any element is not 0, as a tensor on the first device; None without elements."""
    norms = largest([value for value in values if value.numel()])
    return (
        torch.stack([n.float().to(norms[0].device) for n in norms]).ne(0).any() if norms else None
    )


def zero_where_zeroed_(
    grads: Sequence[torch.Tensor],
    where: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor | None],
) -> None:
    """Set each of `grads` to 0 if its tensor in `where` is all 0. Does not block.

    Exception: gradients whose tensor in `where` was already all 0 `before` (see :func:`largest`;
    None if unknown) are kept.
    """
    for grad, now, then in zip(grads, largest(where), before, strict=True):
        zeroed = now == 0 if then is None else (now == 0) & (then != 0)
        dense_values(grad).masked_fill_(zeroed, 0)


def mark(grad: torch.Tensor) -> tuple[int, int]:
    """Version and address of `grad`. They change if it is replaced or written with tracking."""
    return grad._version, 0 if grad.is_sparse else grad.data_ptr()
