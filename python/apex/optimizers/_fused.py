# SPDX-License-Identifier: BSD-3-Clause
"""The base of the aliases of torch's fused optimizers.

Note [Layouts of fused kernels] torch's fused kernels iterate over memory. They combine the elements
of parameter, gradient and state at the same memory offset (not at the same index), for the
parameter's number of elements, and read all of them in one dtype. On the CPU, nothing checks this
layout. So a kernel gets a working copy of each tensor that it would read incorrectly: a dense copy
of a parameter with gaps (a slice of a larger tensor), a float32 copy of a low-precision parameter
that must be updated in float32, and copies of gradients and state with the parameter's strides and
dtype. Afterwards the copies are written back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._state import refuse_gradients, wide_type

_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})

#: Group entries that select the optimizer's algorithm and its kernels. The constructor (or
#: ``add_param_group``) sets them, and loading a state does not change them.
_DECIDED_BEFORE_LOADING = (
    "amsgrad",
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "maximize",
)


def has_gaps(tensor: Tensor) -> bool:
    """Whether elements of `tensor` overlap, or elements of another tensor lie between them."""
    if tensor.is_contiguous():
        return False
    return torch.empty_like(tensor, device="meta").stride() != tensor.stride()


class WorkingCopies:
    """Copies that a kernel uses instead of the tensors: Note [Layouts of fused kernels]."""

    def __init__(self) -> None:
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._written: list[bool] = []

    def parameter(self, param: Tensor, fits: bool) -> Tensor:
        """`param` if the kernel can update it (`fits`), or a dense copy in its wide dtype."""
        if fits:
            return param
        return self._copy(param, torch.empty_like(param, dtype=wide_type(param.dtype)))

    def like(self, tensor: Tensor, param: Tensor, written: bool = True) -> Tensor:
        """`tensor`, or a copy if its dtype or strides differ from those of `param`.

        Args:
            tensor: a gradient or a state, of the shape of `param`.
            param: the result of :meth:`parameter`.
            written: whether the kernel changes the tensor.
        """
        if tensor.dtype == param.dtype and tensor.stride() == param.stride():
            return tensor
        return self._copy(tensor, torch.empty_like(param), written)

    def _copy(self, tensor: Tensor, empty: Tensor, written: bool = True) -> Tensor:
        empty = empty.detach()
        self._originals.append(tensor)
        self._copies.append(empty)
        self._written.append(written)
        return empty

    def fill(self) -> None:
        """Copy the values into the working copies before the kernel runs."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._originals)

    def write_back(self) -> None:
        """Copy the working copies back into the tensors that the kernel changes."""
        pairs = zip(self._originals, self._copies, self._written, strict=True)
        changed = [(original, copy) for original, copy, written in pairs if written]
        if changed:
            torch._foreach_copy_([pair[0] for pair in changed], [pair[1] for pair in changed])


class FusedOptimizer(torch.optim.Optimizer):
    """Base class of aliases of torch's fused optimizers. A derived class defines ``_update``.

    ``torch.amp.GradScaler`` sets two tensors for a step, ``grad_scale`` and ``found_inf``. If
    ``found_inf`` is set, the step changes nothing and creates no state.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluated first, once; its result is returned.

        Raises:
            RuntimeError: a gradient is sparse. Nothing was changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_gradients(self)
        if not self._is_skipped():
            for group in self.param_groups:
                self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _makes_state_of_gradients(self) -> bool:
        """Whether this step creates state that must not be created if the step is skipped."""
        return False

    def _is_skipped(self) -> bool:
        """Whether the host skips the step. If the flag stays on the device, the kernel decides.

        Reading the flag waits for its device. It is free on the CPU.
        """
        found_inf = getattr(self, "found_inf", None)
        # GradScaler's is the number 0 if it saw no gradient
        device = getattr(found_inf, "device", None)
        if device is not None and device.type != "cpu" and not self._makes_state_of_gradients():
            return False
        return bool(found_inf)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch's GradScaler and apex.amp check this before a step that passes their tensors.
        return all(group["fused"] for group in self.param_groups)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        pass  # set once by torch's constructor, and not by copies and pickles


def with_gradient(group: dict[str, Any]) -> list[Tensor]:
    """The parameters of `group` that a step updates."""
    return [param for param in group["params"] if param.grad is not None]


def listed(params: Any) -> Any:
    """`params` as a list. A tensor is kept, so that torch raises; its rows are not parameters."""
    return params if isinstance(params, Tensor) else list(params)


def implementation(params: Any) -> dict[str, bool]:
    """``{"fused": True}`` if torch has a fused kernel for all `params`, else foreach."""
    tensors: list[Tensor] = []
    for entry in params:
        members = entry["params"] if isinstance(entry, dict) else [entry]
        if isinstance(members, Tensor):
            members = [members]
        elif isinstance(entry, dict) and not isinstance(members, (list, tuple)):
            members = entry["params"] = list(members)
        tensors += [member[1] if isinstance(member, tuple) else member for member in members]
    fused = all(
        tensor.is_floating_point() and tensor.device.type in _FUSED_DEVICES for tensor in tensors
    )
    return {"fused": True} if fused else {"foreach": True}


def from_apex(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Convert `state`, saved by this class, torch's or Apex's, to torch's layout for `optimizer`.

    Apex keeps the number of steps only in the group, and does not have torch's settings. torch
    keeps it only with the parameters. Settings of `optimizer` that select its algorithm and its
    kernels do not change. Numbers and a script's own entries come from the state.
    """
    entries = {index: dict(entry) for index, entry in state["state"].items()}
    groups = []
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False):
        kept = {key: own[key] for key in own if key not in ("params", "param_names", "step")}
        decided = {key: own[key] for key in _DECIDED_BEFORE_LOADING if key in own}
        group = {**kept, **saved, **decided}
        known = [entries[index] for index in group["params"] if index in entries]
        step = saved.get("step")
        if isinstance(step, Tensor):  # Apex's with capturable=True
            step = group["step"] = int(step)
        steps = [int(entry["step"]) for entry in known if "step" in entry]
        if step is None and steps:
            group["step"] = max(steps)
        for entry in known:
            entry.pop("max_exp_avg_sq", None)  # of amsgrad, which the aliases do not support
            if step is not None:
                entry.setdefault("step", torch.tensor(float(step), device="cpu"))
        groups.append(group)
    # extra groups, so that torch's check of their number raises
    groups += state["param_groups"][len(groups) :]
    return {**state, "state": entries, "param_groups": groups}
