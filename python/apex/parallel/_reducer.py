# SPDX-License-Identifier: BSD-3-Clause
"""Averaging on demand: Reducer and flat_dist_call, and the functions of Apex beside them."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from apex import _core
from apex._internal.flat import flatten, unflatten
from apex._internal.group_names import name_of
from apex._internal.groups import end_groups_at_exit, require_group


class Reducer:
    """Averages gradients, or given tensors, over all processes on request.

    Args:
        module_or_grads_list: a module, or tensors in (nested) lists and tuples. For a module, rank
            0's parameters are broadcast now, and ``reduce()`` averages its gradients. Tensors are
            averaged in place by ``reduce()``.
        process_group: the processes that take part; default all. Calls on one group need the same
            order on every rank: a second thread needs a group of its own.

    Backward alone never communicates. Collective and blocking, as ``DistributedDataParallel``.

    Raises:
        RuntimeError: if an optimizer steps parameters of the module inside backward.
    """

    def __init__(
        self,
        module_or_grads_list: nn.Module | Iterable[Any],
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.module: nn.Module | None = None
        self.process_group = require_group(process_group, type(self).__name__)
        end_groups_at_exit(self)
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            named = dict(module_or_grads_list.named_parameters())
            names, parameters = list(named), list(named.values())
            group = name_of(self.process_group)
            _core.verify_same_model(names, parameters, [], group)
            _core.require_sendable(names, parameters, "parameter", group)
            _core.broadcast_coalesced(parameters, group, 0, "broadcast of a Reducer's parameters")
        else:
            given: Any = module_or_grads_list
            if not torch.is_tensor(given) and not isinstance(given, Iterable):
                raise TypeError(
                    "Reducer takes a torch.nn.Module, or tensors in lists and tuples, got "
                    f"{type(given).__name__}."
                )
            self.grads = pytree.tree_leaves(given if torch.is_tensor(given) else list(given))

    def reduce(self) -> None:
        """Average every gradient that is not None, in place, grouped by dtype and device.

        The same gradients must be present on every process. On the CPU, blocks until they are
        averaged. On CUDA, blocks until the work is enqueued on the current stream.
        """
        if self.module is not None:
            tensors = [p.grad for p in self.module.parameters() if p.grad is not None]
        else:
            tensors = self.grads
        world = dist.get_world_size(self.process_group)
        name = name_of(self.process_group)
        # The same result on ranks with another rounding mode: Python divides large integers in
        # software.
        scale = (1 << 64) / (world << 64)
        _core.all_reduce_coalesced(tensors, name, scale, "all-reduce in Reducer.reduce()")


def split_by_type(tensors: Sequence[Tensor]) -> OrderedDict[str, list[Tensor]]:
    """The tensors by ``tensor.type()``, in order of first appearance."""
    buckets: OrderedDict[str, list[Tensor]] = OrderedDict()
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets


def split_half_float_double(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lists of the float16, float32, float64 and bfloat16 tensors, without empty lists.

    Accepts any device. Apex's function dropped bfloat16 and tensors outside of CUDA devices.
    """
    kinds = (torch.float16, torch.float32, torch.float64, torch.bfloat16)
    buckets = [[tensor for tensor in tensors if tensor.dtype == kind] for kind in kinds]
    return [bucket for bucket in buckets if bucket]


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Append the tensors in `maybe_tensor`, which may be a nested iterable, to `tensor_list`."""
    items: list[Any] = []
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
    elif not isinstance(maybe_tensor, (str, bytes)):
        with contextlib.suppress(TypeError):  # not iterable
            items = list(maybe_tensor)
    for item in items:
        extract_tensors(item, tensor_list)


@torch.no_grad()
def apply_flat_dist_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run ``call(flat, *extra_args)`` on one flat tensor of tensors of one dtype and device.

    The results are copied back. After ``torch.distributed.all_reduce`` they are divided by the
    number of processes.
    """
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    torch._foreach_copy_(list(bucket), list(unflatten(flat, bucket)))


def flat_dist_call(
    tensors: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run :func:`apply_flat_dist_call` for the tensors of each dtype and device."""
    for members in split_by_type(tensors).values():
        apply_flat_dist_call(members, call, extra_args)
