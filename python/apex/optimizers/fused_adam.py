# SPDX-License-Identifier: BSD-3-Clause
"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from .._internal.dtypes import is_low_precision
from ._foreach import Batch, ForeachOptimizer, fits_fused_kernel, on_device

# Note [Adam without bias correction]
#
# torch's kernels divide by 1 - beta^t. For a very large t this is exactly 1. So a group without
# bias correction passes such a t to the kernel, and counts its steps separately.
_NO_CORRECTION = 1e30

_NO_AMSGRAD = "FusedAdam has no AMSGrad variant; use torch.optim.Adam(amsgrad=True)."


class FusedAdam(ForeachOptimizer):
    """torch's fused Adam, with decoupled weight decay (AdamW) by default.

    As in Apex, both moments of float16 and bfloat16 parameters are float32. These parameters are
    updated in float32 and rounded once. (torch keeps the moments in the dtype of the parameter,
    where the square of a small gradient is 0.) Slices of larger tensors, which torch's fused kernel
    updates incorrectly, are updated by its foreach operators.

    Args:
        params, lr, betas, eps, weight_decay: as in torch.
        bias_correction: False omits the division of both moments by ``1 - beta**t``, as the
            authors of BERT do. May differ by group.
        adam_w_mode: decoupled weight decay.
        amsgrad: must be False.
        set_grad_none: ``zero_grad()`` sets gradients to None; False: to zero.
        capturable: accepted; the fused step can be captured in a CUDA graph without it.
        master_weights: keep float32 values of float16 and bfloat16 parameters, as ``master_param``
            in their state. Elements that no longer round to the parameter's take its values.
        max_grad_norm, eps_inside_sqrt: from early versions; must be 0 and False.

    The number of steps is also in each group as ``step``. Not thread safe.

    Raises:
        ValueError: a negative setting, or ``amsgrad``.
        TypeError: a setting that Apex's class no longer has.
    """

    _own_settings = ("set_grad_none", "adam_w_mode", "master_weights")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        max_grad_norm: float | None = None,
        eps_inside_sqrt: bool = False,
    ) -> None:
        del capturable
        if amsgrad:
            raise ValueError(_NO_AMSGRAD)
        if max_grad_norm:
            raise TypeError(
                f"FusedAdam(max_grad_norm={max_grad_norm}) was an option of early versions of "
                "Apex: remove it, and before step() call "
                f"torch.nn.utils.clip_grad_norm_(parameters, {max_grad_norm}); with apex.amp, clip "
                "amp.master_params(optimizer) after scale_loss."
            )
        if eps_inside_sqrt:
            raise TypeError(
                "FusedAdam(eps_inside_sqrt=True) was an option of early versions of Apex; remove "
                "it, because eps is always added outside the square root."
            )
        self.set_grad_none = set_grad_none
        self.adam_w_mode = int(adam_w_mode)
        self.master_weights = master_weights
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``torch.optim.Adam.add_param_group`` does.

        Raises:
            ValueError: a negative setting, or ``amsgrad``.
        """
        if param_group.get("amsgrad"):
            raise ValueError(_NO_AMSGRAD)
        super().add_param_group(param_group)

    def _update(self) -> None:
        for group in self.param_groups:
            self._count_step(group)
            for members, batch in self._batches(group):
                if self.master_weights and is_low_precision(members[0]):
                    batch.params = self._masters_of(members, batch)
                self._update_batch(members, batch, group)

    def _masters_of(self, members: list[Tensor], batch: Batch) -> list[Tensor]:
        masters = self._state_of(members, "master_param")
        rounded = [master.to(member.dtype) for master, member in zip(masters, members, strict=True)]
        for master, value, member, wide in zip(
            masters, rounded, members, batch.params, strict=True
        ):
            master.copy_(torch.where(value == member, master, wide))
        return masters

    def _update_batch(self, members: list[Tensor], batch: Batch, group: dict[str, Any]) -> None:
        states = [self.state[member] for member in members]
        for member, state in zip(members, states, strict=True):
            if "step" not in state:
                self._state_of([member], "exp_avg")
                self._state_of([member], "exp_avg_sq")
                state["step"] = torch.zeros((), device=batch.device)
        firsts = [state["exp_avg"] for state in states]
        seconds = [state["exp_avg_sq"] for state in states]
        steps = [state["step"] for state in states]
        fused = fits_fused_kernel(batch.params, batch.grads, firsts, seconds)
        if not group["bias_correction"]:
            torch._foreach_add_(steps, 1)
            steps = [torch.full_like(step, _NO_CORRECTION) for step in steps]
        adam(
            batch.params,
            batch.grads,
            firsts,
            seconds,
            [],
            steps,
            foreach=not fused,
            capturable=not fused and batch.device.type != "cpu",
            fused=fused,
            decoupled_weight_decay=bool(self.adam_w_mode),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=on_device(group["lr"], batch.device) if fused else float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _load_wide(self, state_dict: dict[str, Any]) -> None:
        super()._load_wide(state_dict)
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param)
                if state:
                    state.pop("max_exp_avg_sq", None)  # of amsgrad
                    if "step" not in state:  # Apex counts only in the group
                        count = float(group.get("step") or 0)
                        state["step"] = torch.full((), count, device=param.device)
