# SPDX-License-Identifier: BSD-3-Clause
"""Skipping a step on the device, so that the host need not know whether it happens.

Two kinds of optimizers allow it, on accelerators. torch's fused ones take the overflow flag as a
tensor (attribute ``found_inf``) and leave everything as it is where the flag is set. Capturable
ones (``capturable=True`` in every parameter group: parameters and state are tensors that a step
changes in place) know no flag; for them, the tensors are copied before the step, and written back
by ``torch.where`` after it. That is one copy and one selection of what a step writes: memory
traffic, but no wait, and it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def _on_accelerator(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def _parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def takes_flag(optimizer: Any) -> bool:
    """Whether `optimizer` skips by itself where ``found_inf`` is set: fused, on an accelerator.

    Not before the first step of SGD with momentum: torch's kernel then skips the momentum, too, and
    leaves it uninitialized for the next step.
    """
    return (
        bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        and all(map(_on_accelerator, _parameters(optimizer)))
        and not any(
            group.get("momentum")
            and param.grad is not None
            and optimizer.state.get(param, {}).get("momentum_buffer") is None
            for group in optimizer.param_groups
            for param in group["params"]
        )
    )


def can_be_undone(optimizer: Any) -> bool:
    """Whether :func:`step_unless` works: capturable, on an accelerator, and its state exists.

    The first step makes the state, and what it was before only the optimizer knows. So before the
    first step the host decides.
    """
    return all(group.get("capturable", False) for group in optimizer.param_groups) and all(
        _on_accelerator(param) and (param.grad is None or bool(optimizer.state.get(param)))
        for param in _parameters(optimizer)
    )


def step_unless(skip: torch.Tensor, optimizer: Any, step: Callable[[], Any]) -> Any:
    """Call ``step()``, and undo it on the device where `skip` (one number) is not 0.

    Blocks nothing. Bit for bit: without an overflow the result is that of ``step()``, with one
    every parameter and state tensor is what it was.
    """
    with torch.no_grad():
        written = [param for param in _parameters(optimizer) if param.grad is not None]
        for param in tuple(written):
            state = optimizer.state.get(param, {})
            written += [value for value in state.values() if torch.is_tensor(value)]
        before = [tensor.detach().clone() for tensor in written]
    result = step()
    with torch.no_grad():
        flags: dict[torch.device, torch.Tensor] = {}
        for tensor, old in zip(written, before, strict=True):
            if tensor.device not in flags:
                flags[tensor.device] = skip.to(tensor.device, non_blocking=True).reshape(()) != 0
            tensor.copy_(torch.where(flags[tensor.device], old, tensor))
    return result
