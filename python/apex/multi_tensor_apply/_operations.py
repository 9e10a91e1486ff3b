# SPDX-License-Identifier: BSD-3-Clause
"""The multi-tensor kernels of Apex that scripts call directly, on torch's foreach operators.

Every function takes `chunk_size`, which is ignored, `overflow_buf`, a tensor of one integer or
None, and `tensor_lists`, lists of equal length. The lists may have any dtypes. Float64 tensors are
computed in float64, all others in float32. `overflow_buf` is set to 1 if an input value is inf or
nan, and is never cleared; the results are written in any case. No function copies to the host, and
autograd records nothing. Tensors at one index have the same number of elements, and may differ in
shape. Not thread safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TensorLists = Sequence[Sequence[Tensor]]


def _wide_type(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _lists(tensor_lists: TensorLists, count: int, function: str) -> list[list[Tensor]]:
    lists = [list(members) for members in tensor_lists]
    lengths = {len(members) for members in lists}
    if len(lists) != count or len(lengths) > 1:
        raise ValueError(
            f"{function} takes {count} list(s) of equal length, not lists of "
            f"{[len(members) for members in lists]} tensors."
        )
    for index, row in enumerate(zip(*lists, strict=True)):
        if len({tensor.numel() for tensor in row}) > 1:
            raise ValueError(
                f"{function}: the tensors at index {index} of the lists have different numbers of "
                f"elements, with the shapes {[tuple(tensor.shape) for tensor in row]}."
            )
    return lists


def _by_kind(lists: list[list[Tensor]]) -> list[list[list[Tensor]]]:
    """The lists, split so that within a part all tensors share a device and each list has one
    dtype."""
    parts: dict[Any, list[list[Tensor]]] = {}
    for row in zip(*lists, strict=True):
        kind = (row[0].device, *(tensor.dtype for tensor in row))
        part = parts.setdefault(kind, [[] for _ in lists])
        for members, tensor in zip(part, row, strict=True):
            members.append(tensor)
    return list(parts.values())


def wide_copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """New tensors of `dtype`, by one multi-tensor operation."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


def _wide(tensors: list[Tensor], dtype: torch.dtype, targets: list[Tensor]) -> list[Tensor]:
    """Copies in the shapes of `targets`. Apex's kernels read memory and ignore shapes."""
    copies = wide_copies(tensors, dtype)
    return [copy.reshape(target.shape) for copy, target in zip(copies, targets, strict=True)]


def _note_non_finite(overflow_buf: Tensor | None, tensors: list[Tensor]) -> None:
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    if overflow_buf is None or not filled:
        return
    # The largest magnitude is inf or nan if and only if one of the values is.
    largest = torch.stack(torch._foreach_norm(filled, float("inf")))
    _note_overflow(overflow_buf, ~torch.isfinite(largest))


def _note_overflow(overflow_buf: Tensor, found: Tensor) -> None:
    flag = found.any().to(overflow_buf.device)
    overflow_buf.copy_(torch.where(flag, torch.ones_like(overflow_buf), overflow_buf))


def _factor(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device, dtype).reshape(())
    return float(value)


@torch.no_grad()
def multi_tensor_scale(
    chunk_size: int, overflow_buf: Tensor | None, tensor_lists: TensorLists, scale: float | Tensor
) -> None:
    """``tensor_lists[1][i] = tensor_lists[0][i] * scale``. Both lists may hold the same tensors."""
    del chunk_size
    lists = _lists(tensor_lists, 2, "multi_tensor_scale")
    for sources, targets in _by_kind(lists):
        dtype = _wide_type(sources[0], targets[0])
        _note_non_finite(overflow_buf, sources)
        values = _wide(sources, dtype, targets)
        torch._foreach_mul_(values, _factor(scale, values[0].device, dtype))
        torch._foreach_copy_(targets, values)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    overflow_buf: Tensor | None,
    tensor_lists: TensorLists,
    a: float | Tensor,
    b: float | Tensor,
    arg_to_check: int = -1,
) -> None:
    """``tensor_lists[2][i] = a * tensor_lists[0][i] + b * tensor_lists[1][i]``.

    `arg_to_check` is the list that is checked for inf and nan: 0, 1, or -1 for both.
    """
    del chunk_size
    if arg_to_check not in (-1, 0, 1):
        raise ValueError(f"arg_to_check is {arg_to_check}; it must be -1 (both), 0 or 1.")
    lists = _lists(tensor_lists, 3, "multi_tensor_axpby")
    for firsts, seconds, targets in _by_kind(lists):
        dtype = _wide_type(firsts[0], seconds[0], targets[0])
        if arg_to_check != 1:
            _note_non_finite(overflow_buf, firsts)
        if arg_to_check != 0:
            _note_non_finite(overflow_buf, seconds)
        values, others = (_wide(members, dtype, targets) for members in (firsts, seconds))
        torch._foreach_mul_(values, _factor(a, values[0].device, dtype))
        torch._foreach_mul_(others, _factor(b, values[0].device, dtype))
        torch._foreach_add_(values, others)
        torch._foreach_copy_(targets, values)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int,
    overflow_buf: Tensor | None,
    tensor_lists: TensorLists,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """The L2 norm of all elements, ``[1]``, and of each tensor, ``[number of tensors]``.

    Without `per_tensor` the second result is empty. An empty list has norm 0. The results are
    float32, or float64 if one of the tensors is, on the device of the first tensor. `overflow_buf`
    is set to 1 if the norm is inf or nan, even if it overflows for finite values.
    """
    del chunk_size
    (members,) = _lists(tensor_lists, 1, "multi_tensor_l2norm")
    if not members:
        device = None if overflow_buf is None else overflow_buf.device
        return torch.zeros(1, device=device), torch.zeros(0, device=device)
    dtype = _wide_type(*members)
    norms = torch.zeros(len(members), dtype=dtype, device=members[0].device)
    by_kind: dict[Any, list[int]] = {}
    for index, tensor in enumerate(members):
        if tensor.numel() > 0:
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(index)
    for indices in by_kind.values():
        some = torch._foreach_norm([members[i] for i in indices], 2, dtype=dtype)
        found = torch.stack(some).to(norms.device)
        if len(indices) == len(members):
            norms = found
        else:
            norms[torch.tensor(indices, device=norms.device)] = found
    total = norms.norm().reshape(1)
    if overflow_buf is not None:
        _note_overflow(overflow_buf, ~torch.isfinite(total))
    return total, norms if per_tensor else norms.new_zeros(0)


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    overflow_buf: Tensor | None,
    tensor_lists: TensorLists,
    inv_scale: float | Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Like :func:`multi_tensor_l2norm`, of the tensors times `inv_scale`. The tensors stay
    scaled."""
    total, each = multi_tensor_l2norm(chunk_size, overflow_buf, tensor_lists, per_tensor)
    factor = _factor(inv_scale, total.device, total.dtype)
    factor = factor.abs() if isinstance(factor, Tensor) else abs(factor)
    return total * factor, each * factor
