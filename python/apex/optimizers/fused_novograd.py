# SPDX-License-Identifier: BSD-3-Clause
"""NovoGrad."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ._foreach import Batch, ForeachOptimizer, norms, on_device


class FusedNovoGrad(ForeachOptimizer):
    """NovoGrad: momentum on gradients divided by a running norm, one number per parameter.

    Algorithm: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments for
    Training of Deep Networks" (2019), algorithm 1, with the options of NVIDIA's implementation.
    With a gradient g, parameter p, weight decay w, and v the running norm (not its square)::

        v <- sqrt(beta2 * v^2 + (1 - beta2) * |g|^2)        n = v / sqrt(1 - beta2^t) + eps
        m <- beta1 * m + (1 - beta1) * g
        p <- p - lr * (m / (1 - beta1^t) / n + w * p)

    Computed with torch's foreach operators. Low-precision parameters are updated in float32, and
    their m is float32.

    Args:
        params: parameters, or groups of them; real and dense, of any floating-point dtype.
        lr: learning rate; a number or a tensor.
        bias_correction: False omits the two divisors with t.
        betas, eps, weight_decay: see above.
        amsgrad: must be False.
        reg_inside_moment: as in the paper, divide and decay before the momentum: ``g / n + w * p``
            replaces g in m, and p changes by ``lr * m / (1 - beta1^t)``.
        grad_averaging: False weights the gradient in m by 1 instead of ``1 - beta1``, as in the
            paper.
        norm_type: 2, or 0 for the largest magnitude, which is averaged without squares.
        init_zero: v starts from 0; False: from the first gradient's norm.
        set_grad_none: ``zero_grad()`` sets gradients to None; False: to zero.

    t, the number of steps, is ``step`` in each group. Not thread safe. :meth:`step` copies nothing
    to the host.

    Raises:
        RuntimeError: for amsgrad, or another `norm_type`.
        ValueError: a negative `lr`, `eps` or `weight_decay`, or `betas` outside of [0, 1).
    """

    _own_settings = ("set_grad_none", "moment_mode")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedNovoGrad has no AMSGrad variant; pass amsgrad=False.")
        self.set_grad_none = set_grad_none
        #: 0: as in the paper, see `reg_inside_moment`; 1: decoupled.
        self.moment_mode = 0 if reg_inside_moment else 1
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do.

        Raises:
            RuntimeError: a `norm_type` other than 0 and 2.
            ValueError: as in the constructor.
        """
        norm_type = param_group.get("norm_type", self.defaults["norm_type"])
        if norm_type not in (0, 2):
            raise RuntimeError(
                "FusedNovoGrad supports norm_type 2 (L2) and 0 (maximum magnitude), got "
                f"{norm_type}."
            )
        super().add_param_group(param_group)

    def _update(self) -> None:
        for group in self.param_groups:
            step = self._count_step(group)
            for members, batch in self._batches(group):
                self._update_batch(members, batch, group, step)

    def _blend_norms(
        self, members: list[Tensor], batch: Batch, group: dict[str, Any]
    ) -> list[Tensor]:
        """Update the running norms and return them, 0-dim."""
        largest = group["norm_type"] == 0
        present = norms(batch.grads, math.inf if largest else 2)
        for param, norm in zip(members, present, strict=True):
            state = self.state[param]
            if "exp_avg_sq" not in state:
                state["exp_avg_sq"] = torch.zeros_like(norm) if group["init_zero"] else norm.clone()
        running = [self.state[param]["exp_avg_sq"] for param in members]
        beta2 = group["betas"][1]
        if largest:
            torch._foreach_mul_(running, beta2)
            torch._foreach_add_(running, present, alpha=1 - beta2)
            return running
        # sqrt(beta2 * v^2 + (1 - beta2) * n^2)
        squares = torch._foreach_mul(running, running)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, present, present, value=1 - beta2)
        torch._foreach_sqrt_(squares)
        torch._foreach_copy_(running, squares)
        return running

    def _update_batch(
        self, members: list[Tensor], batch: Batch, group: dict[str, Any], step: int
    ) -> None:
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        corrected = bool(group["bias_correction"])
        weight = 1 - beta1 if group["grad_averaging"] else 1.0
        rate = on_device(group["lr"], batch.device)
        running = self._blend_norms(members, batch, group)
        divisors = torch._foreach_div(running, math.sqrt(1 - beta2**step) if corrected else 1.0)
        torch._foreach_add_(divisors, group["eps"])
        moments = self._state_of(members, "exp_avg")
        torch._foreach_mul_(moments, beta1)
        if self.moment_mode == 0:
            terms = list(torch._foreach_div(batch.grads, list(divisors)))
            if decay:
                torch._foreach_add_(terms, batch.params, alpha=decay)
            torch._foreach_add_(moments, terms, alpha=weight)
            updates = torch._foreach_div(moments, 1 - beta1**step if corrected else 1.0)
        else:
            torch._foreach_add_(moments, batch.grads, alpha=weight)
            updates = torch._foreach_div(moments, 1 - beta1**step if corrected else 1.0)
            torch._foreach_div_(updates, list(divisors))
            if decay:
                torch._foreach_add_(updates, batch.params, alpha=decay)
        torch._foreach_mul_(updates, rate)
        torch._foreach_sub_(batch.params, updates)
