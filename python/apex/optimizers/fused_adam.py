# SPDX-License-Identifier: BSD-3-Clause
"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ._choose import FusedWhereRight, from_apex, implementation, laid_out_like, listed

# Note [Adam without bias correction]
#
# torch's kernels divide by 1 - beta^t. With t beyond all bounds that is 1, exactly, so a group
# without bias correction hands them such a t, and counts its steps itself.
_NO_CORRECTION = 1e30


class FusedAdam(FusedWhereRight, torch.optim.Adam):
    """``torch.optim.Adam(fused=True)``, decoupled weight decay (AdamW) by default; ``foreach=True``
    for groups with parameters that are slices of larger tensors.

    Args:
        params, lr, betas, eps, weight_decay: as of torch.
        bias_correction: False leaves out the division of both moments by ``1 - beta**t``, as the
            authors of BERT do. May differ by group.
        adam_w_mode: decoupled weight decay.
        amsgrad: must be False.
        set_grad_none: accepted; ``zero_grad`` sets gradients to None.
        capturable, master_weights: accepted; the fused step is capturable in a CUDA graph as it
            is, and masters come from :mod:`apex.amp`.
        max_grad_norm, eps_inside_sqrt: of early versions; must be 0 and False.

    The number of calls of ``step()`` is also in each group, as ``step``, where schedulers of old
    scripts look for it. It includes steps that were skipped on the device.

    Raises:
        ValueError: a setting that torch's implementation does not have.
        TypeError: a setting that Apex's class does not have any more.
    """

    # The entry of a group that every step changes, and that no arithmetic uses.
    _counter = "step"

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
        del set_grad_none, master_weights
        if amsgrad:
            raise ValueError(
                "FusedAdam has no AMSGrad variant; use torch.optim.Adam(amsgrad=True)."
            )
        if max_grad_norm:
            raise TypeError(
                f"FusedAdam(max_grad_norm={max_grad_norm}) was an option of early versions of "
                "Apex: remove it, and before step() call torch.nn.utils.clip_grad_norm_("
                f"parameters, {max_grad_norm}); with apex.amp, of "
                "amp.master_params(optimizer), after scale_loss."
            )
        if eps_inside_sqrt:
            raise TypeError(
                "FusedAdam(eps_inside_sqrt=True) was an option of early versions of Apex; eps is "
                "added outside of the square root."
            )
        params = listed(params)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adam_w_mode,
            capturable=capturable,
            **implementation(params),
        )
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> bool:
        # Called once per group and step.
        self._leave_fused(group)
        base: Any = super()
        has_complex: bool = base._init_group(
            group, params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
        )
        if group["fused"]:
            for i, param in enumerate(params_with_grad):
                grads[i] = laid_out_like(grads[i], param)
                for name, moments in (("exp_avg", exp_avgs), ("exp_avg_sq", exp_avg_sqs)):
                    moments[i] = self.state[param][name] = laid_out_like(moments[i], param)
        group[self._counter] = int(group.get(self._counter) or 0) + 1
        if not group["bias_correction"]:
            self._count_apart(state_steps)
        return has_complex

    @torch.no_grad()
    def _count_apart(self, state_steps: list[Tensor]) -> None:
        """See Note [Adam without bias correction]."""
        found_inf = getattr(self, "found_inf", None)
        for index, step in enumerate(state_steps):
            step += 1
            if found_inf is not None:
                step -= found_inf.to(step.device).reshape(())
            state_steps[index] = torch.full_like(step, _NO_CORRECTION)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, of torch's, or of Apex's class of this name."""
        super().load_state_dict(from_apex(self, state_dict))
