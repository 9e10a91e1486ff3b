# SPDX-License-Identifier: BSD-3-Clause
"""Skip an optimizer step on the device, without host synchronization.

Two kinds of optimizers on accelerators support this. torch's fused optimizers take the overflow
flag as a tensor (attribute ``found_inf``) and change nothing if it is set. Capturable optimizers
(``capturable=True`` in every parameter group; a step changes parameters and state in place) have no
such flag. For them, the tensors are copied before the step and restored by ``torch.where`` after
it. This costs memory traffic, one copy and one selection of the tensors that a step writes. It does
not block, and CUDA graphs can capture it.
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
    """Whether `optimizer` skips the step itself if ``found_inf`` is set: fused, on an accelerator.

    False before the first step of SGD with momentum: torch's kernel would then also skip the
    momentum and leave it uninitialized for the next step.
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
    """Whether :func:`step_unless` works: capturable, on an accelerator, with existing state.

    Only the optimizer knows the initial state that its first step creates. So the host decides
    whether to skip that step.
    """
    return all(group.get("capturable", False) for group in optimizer.param_groups) and all(
        _on_accelerator(param) and (param.grad is None or bool(optimizer.state.get(param)))
        for param in _parameters(optimizer)
    )


def step_unless(skip: torch.Tensor, optimizer: Any, step: Callable[[], Any]) -> Any:
    """Call ``step()``, and undo it on the device if `skip` (one number) is not 0.

    Does not block. The result is bitwise exact: without an overflow that of ``step()``, and with an
    overflow the parameters and state from before.
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
