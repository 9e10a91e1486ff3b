# SPDX-License-Identifier: BSD-3-Clause
"""LAMB."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .._internal.dtypes import alike
from ._foreach import Batch, ForeachOptimizer, norms, on_device


def _norm_of_gradients(groups: list[list[Tensor]]) -> Tensor | None:
    """The norm of all gradients together; None without gradients."""
    found: list[Tensor] = []
    for params in groups:
        for members in alike(params):
            found += norms([param.grad for param in members if param.grad is not None])
    if not found:
        return None
    widest = max((norm.dtype for norm in found), key=lambda dtype: dtype.itemsize)
    total: Tensor = torch.stack([norm.to(found[0].device, widest) for norm in found]).norm()
    return total


class FusedLAMB(ForeachOptimizer):
    """LAMB: Adam with an update that is scaled, per parameter, by the norm of the parameter.

    Algorithm: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
    (ICLR 2020), algorithm 2, with the clipping of NVIDIA's implementation. First, all gradients, of
    all groups together, are divided by ``max(1, norm / max_grad_norm)``. With a clipped gradient g,
    parameter p, weight decay w::

        m <- beta1 * m + (1 - beta1) * g          v <- beta2 * v + (1 - beta2) * g^2
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + w * p
        p <- p - lr * |p| / |u| * u

    The ratio of the norms is replaced by 1 if one of them is zero, and in groups without weight
    decay unless `use_nvlamb` is set. Computed with torch's foreach operators. Low-precision
    parameters are updated in float32, and their m and v are float32.

    Args:
        params: parameters, or groups of them; real and dense, of any floating-point dtype.
        lr: learning rate; a number or a tensor.
        bias_correction: False omits the two divisors with t.
        betas, eps, weight_decay: see above.
        amsgrad: must be False.
        adam_w_mode: False adds ``w * p`` to g instead of u.
        grad_averaging: False weights g in m by 1 instead of ``1 - beta1``.
        set_grad_none: ``zero_grad()`` sets gradients to None; False: to zero.
        max_grad_norm: see above; None or 0: no clipping. One number for all groups.
        use_nvlamb: also scale the update in groups without weight decay.

    t, the number of steps, is ``step`` in each group. With several ranks, the gradients have been
    averaged, so every rank computes the same norm. Not thread safe. :meth:`step` copies nothing to
    the host.

    Raises:
        RuntimeError: for amsgrad.
        ValueError: a negative `lr`, `eps`, `weight_decay` or `max_grad_norm`, or `betas` outside of
            [0, 1).
    """

    _own_settings = ("set_grad_none", "adam_w_mode", "use_nvlamb")
    #: The parameters whose gradients are in the norm, if not those of the groups: ShardedOptimizer.
    _clipped: list[list[Tensor]] | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLAMB has no AMSGrad variant; pass amsgrad=False.")
        if max_grad_norm is not None and max_grad_norm < 0:
            raise ValueError(
                f"max_grad_norm is {max_grad_norm}; pass a positive number, or None for no "
                "clipping."
            )
        self.set_grad_none = set_grad_none
        self.adam_w_mode = int(adam_w_mode)
        self.use_nvlamb = use_nvlamb
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)

    def _update(self) -> None:
        divisors: dict[torch.device, Tensor] = {}
        divisor = self._clipping_divisor()
        for group in self.param_groups:
            step = self._count_step(group)
            for members, batch in self._batches(group):
                if divisor is not None and batch.device not in divisors:
                    divisors[batch.device] = divisor.to(batch.device)
                self._update_batch(members, batch, group, step, divisors.get(batch.device))

    def _clipping_divisor(self) -> Tensor | None:
        """max(1, norm / max_grad_norm) over all gradients; None without clipping or gradients."""
        limit = self.defaults["max_grad_norm"]
        lists = self._clipped or [group["params"] for group in self.param_groups]
        total = _norm_of_gradients(lists) if limit else None
        factor = self._factor()
        if total is not None and factor is not None:
            total = total * factor
        return None if total is None else torch.where(total > limit, total / limit, 1.0)

    def _update_batch(
        self,
        members: list[Tensor],
        batch: Batch,
        group: dict[str, Any],
        step: int,
        divisor: Tensor | None,
    ) -> None:
        beta1, beta2 = group["betas"]
        decay = group["weight_decay"]
        corrected = bool(group["bias_correction"])
        params = batch.params
        grads = batch.grads
        if divisor is not None:
            grads = list(torch._foreach_div(grads, divisor.to(batch.dtype)))
        if decay and not self.adam_w_mode:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        firsts = self._state_of(members, "exp_avg")
        seconds = self._state_of(members, "exp_avg_sq")
        torch._foreach_mul_(firsts, beta1)
        torch._foreach_add_(firsts, grads, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, grads, grads, value=1 - beta2)

        denominators = torch._foreach_div(seconds, 1 - beta2**step if corrected else 1.0)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        updates = list(torch._foreach_div(firsts, 1 - beta1**step if corrected else 1.0))
        torch._foreach_div_(updates, denominators)
        if decay and self.adam_w_mode:
            torch._foreach_add_(updates, params, alpha=decay)

        rate = on_device(group["lr"], batch.device)
        if decay or self.use_nvlamb:
            of_params, of_updates = torch.stack(norms(params)), torch.stack(norms(updates))
            usable = (of_params != 0) & (of_updates != 0)
            rates = torch.where(usable, of_params / of_updates, 1) * rate
            torch._foreach_mul_(updates, list(rates.to(batch.dtype).unbind()))
        else:
            torch._foreach_mul_(updates, rate)
        torch._foreach_sub_(params, updates)
