# SPDX-License-Identifier: BSD-3-Clause
"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from .._internal.dtypes import is_low_precision
from ._fused import (
    FusedOptimizer,
    WorkingCopies,
    from_apex,
    has_gaps,
    implementation,
    listed,
    with_gradient,
)
from ._state import WideState, wide_type

# Note [Adam without bias correction]
#
# torch's kernels divide by 1 - beta^t. For a very large t this is exactly 1. So a group without
# bias correction passes such a t to the kernel, and counts its steps separately.
_NO_CORRECTION = 1e30

_NO_AMSGRAD = "FusedAdam has no AMSGrad variant; use torch.optim.Adam(amsgrad=True)."


class FusedAdam(WideState, FusedOptimizer, torch.optim.Adam):
    """``torch.optim.Adam(fused=True)`` with decoupled weight decay (AdamW) by default.

    As in Apex, both moments of float16 and bfloat16 parameters are float32. These parameters are
    updated in float32 and rounded once. (torch keeps the moments in the dtype of the parameter,
    where the square of a small gradient is 0.) Slices of larger tensors are also updated correctly,
    which torch's kernel does not do.

    Args:
        params, lr, betas, eps, weight_decay: as in torch.
        bias_correction: False omits the division of both moments by ``1 - beta**t``, as the
            authors of BERT do. May differ by group.
        adam_w_mode: decoupled weight decay.
        amsgrad: must be False.
        set_grad_none: accepted; ``zero_grad`` sets gradients to None.
        capturable, master_weights: accepted. The fused step can be captured in a CUDA graph without
            the option, and :mod:`apex.amp` provides master weights.
        max_grad_norm, eps_inside_sqrt: from early versions; must be 0 and False.

    The number of calls of ``step()`` is also in each group as ``step``, where schedulers of old
    scripts read it. It includes steps that ``torch.amp.GradScaler`` skipped on an accelerator,
    because the host does not see those. The update uses the number of steps that were not skipped.
    Not thread safe. :meth:`step` copies nothing to the host.

    Raises:
        ValueError: a setting that torch's implementation does not have.
        TypeError: a setting that Apex's class no longer has.
    """

    # The group entry that every step changes and that no arithmetic uses.
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``torch.optim.Adam.add_param_group`` does.

        Raises:
            ValueError: with ``amsgrad``.
        """
        if param_group.get("amsgrad"):
            raise ValueError(_NO_AMSGRAD)
        super().add_param_group(param_group)

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            on_device = group["fused"] or group["capturable"]
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=param.device if on_device else "cpu"
            )
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(param, dtype=wide_type(param.dtype))
        return state

    def _update(self, group: dict[str, Any]) -> None:
        group[self._counter] = int(group.get(self._counter) or 0) + 1
        grad_scale = getattr(self, "grad_scale", None)
        working = WorkingCopies()
        params, grads, steps = [], [], []
        firsts: list[Tensor] = []
        seconds: list[Tensor] = []
        for member in with_gradient(group):
            assert member.grad is not None
            state = self._state_of(member, group)
            fits = not has_gaps(member) and not is_low_precision(member)
            param = working.parameter(member, fits)
            params.append(param)
            grads.append(working.like(member.grad, param, written=grad_scale is not None))
            for name, moments in (("exp_avg", firsts), ("exp_avg_sq", seconds)):
                # A copy becomes the state, for example after a change of the memory format.
                state[name] = working.like(state[name], param, written=False)
                moments.append(state[name])
            steps.append(state["step"])
        if not group["bias_correction"]:
            self._count_apart(steps)
        working.fill()
        adam(
            params,
            grads,
            firsts,
            seconds,
            [],
            steps,
            foreach=group["foreach"],
            capturable=group["capturable"],
            fused=group["fused"],
            grad_scale=grad_scale,
            found_inf=getattr(self, "found_inf", None),
            has_complex=any(map(torch.is_complex, params)),
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        working.write_back()

    def _count_apart(self, state_steps: list[Tensor]) -> None:
        """See Note [Adam without bias correction]."""
        found_inf = getattr(self, "found_inf", None)
        for index, step in enumerate(state_steps):
            step += 1
            if found_inf is not None:
                step -= found_inf.to(step.device).reshape(())
            state_steps[index] = torch.full_like(step, _NO_CORRECTION)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, of torch's, or of Apex's class of the same name.

        Options that select the algorithm (``adam_w_mode``, ``maximize``) or the kernels
        (``capturable``) are not loaded. Maxima of ``amsgrad`` are ignored.
        """
        super().load_state_dict(state_dict)

    def _from_apex(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return from_apex(self, state_dict)
