# SPDX-License-Identifier: BSD-3-Clause
"""Which of torch's implementations an alias can use.

Note [Strides and fused kernels]
torch's fused kernels walk through memory: they pair the elements of parameter, gradient and state
that lie at the same place, not at the same index, and take as many as the parameter has. On the CPU
nothing checks that. So a parameter with gaps (a slice of a larger tensor) is left to the foreach
implementation, which goes by index, and gradients and state with other strides than the parameter
(one of the two is channels_last, say) are brought to the parameter's.
"""

from __future__ import annotations

from typing import Any

import torch

from .._internal.dtypes import is_low_precision

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def is_low_precision_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is one that torch's fused SGD gets wrong.

    Its CPU kernel skips whole vectors of float16 and bfloat16 parameters and writes wrong momenta
    (pytorch#191763; torch 2.12 and 2.13 at least). Those of Adam and AdamW are right.
    """
    return tensor.device.type == "cpu" and is_low_precision(tensor)


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Whether elements of `tensor` overlap, or others lie between them."""
    if tensor.is_contiguous():
        return False
    return torch.empty_like(tensor, device="meta").stride() != tensor.stride()


def laid_out_like(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy with the strides of `param`, which has no gaps, if it has others."""
    if tensor.stride() == param.stride():
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


class FusedWhereRight(torch.optim.Optimizer):
    """Base of aliases of torch's fused optimizers: foreach for groups that the kernel gets wrong.

    See Note [Strides and fused kernels].
    """

    def _is_wrong_for(self, param: torch.Tensor) -> bool:
        """Whether torch's fused kernel does not update `param` rightly."""
        return _has_gaps(param)

    def _fused_is_wrong(self, group: dict[str, Any]) -> bool:
        return any(map(self._is_wrong_for, group["params"]))

    def _leave_fused(self, group: dict[str, Any]) -> None:
        # In a step and not in the constructor: parameters may be cast or moved later.
        if group["fused"] and self._fused_is_wrong(group):
            # torch's foreach Adam takes no tensor as learning rate; its loop over parameters does.
            group["fused"], group["foreach"] = False, not isinstance(group["lr"], torch.Tensor)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch's GradScaler and apex.amp ask before a step whether the kernel takes their tensors.
        return all(
            group["fused"] and not self._fused_is_wrong(group) for group in self.param_groups
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        pass  # set by torch's constructor, once


def listed(params: Any) -> Any:
    """`params` as a list. A tensor stays one, for torch's error: its rows are no parameters."""
    return params if isinstance(params, torch.Tensor) else list(params)


def implementation(params: Any) -> dict[str, bool]:
    """``{"fused": True}`` where torch has a fused kernel for all `params`, else foreach."""
    tensors: list[torch.Tensor] = []
    for entry in params:
        members = entry["params"] if isinstance(entry, dict) else [entry]
        if isinstance(members, torch.Tensor):
            members = [members]
        elif isinstance(entry, dict) and not isinstance(members, (list, tuple)):
            members = entry["params"] = list(members)
        tensors += [member[1] if isinstance(member, tuple) else member for member in members]
    fused = all(
        tensor.is_floating_point() and tensor.device.type in _FUSED_DEVICES for tensor in tensors
    )
    return {"fused": True} if fused else {"foreach": True}


def from_apex(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """`state`, where Apex's class has saved it in the layout of torch's, for `optimizer` to load.

    Apex keeps the number of steps in the group only, and does not have torch's settings; torch
    keeps it with the parameters only.
    """
    entries = {index: dict(entry) for index, entry in state["state"].items()}
    groups = []
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False):
        kept = {key: own[key] for key in own if key not in ("params", "param_names", "step")}
        group = {**kept, **saved}
        known = [entries[index] for index in group["params"] if index in entries]
        step = saved.get("step")
        steps = [int(entry["step"]) for entry in known if "step" in entry]
        if step is None and steps:
            group["step"] = max(steps)
        for entry in known if step is not None else ():
            entry.setdefault("step", torch.tensor(float(step)))
        groups.append(group)
    groups += state["param_groups"][len(groups) :]  # as many as there are: torch compares
    return {**state, "state": entries, "param_groups": groups}
