# SPDX-License-Identifier: BSD-3-Clause
"""Adagrad."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ._foreach import ForeachOptimizer, on_device


class FusedAdagrad(ForeachOptimizer):
    """Adagrad: gradients divided by the root of the sum of their squares.

    Algorithm: Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and
    Stochastic Optimization" (JMLR 2011), with diagonal matrices::

        s <- s + g^2        p <- p - lr * g / (sqrt(s) + eps)

    Computed with torch's foreach operators. Low-precision parameters are updated in float32, and
    their s is float32.

    Args:
        params: parameters, or groups of them; real and dense, of any floating-point dtype.
        lr: learning rate; a number or a tensor.
        eps: see above.
        weight_decay: w; ``w * p`` is added to g.
        set_grad_none: ``zero_grad()`` sets gradients to None; False: to zero.
        adagrad_w_mode: decoupled weight decay: p also changes by ``lr * w * p``, and g does not.

    Not thread safe. :meth:`step` copies nothing to the host.

    Raises:
        ValueError: a negative `lr`, `eps` or `weight_decay`.
    """

    _own_settings = ("set_grad_none", "adagrad_w_mode")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.set_grad_none = set_grad_none
        self.adagrad_w_mode = int(adagrad_w_mode)
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def _update(self) -> None:
        for group in self.param_groups:
            decay = group["weight_decay"]
            for members, batch in self._batches(group):
                grads = batch.grads
                if decay and not self.adagrad_w_mode:
                    grads = list(torch._foreach_add(grads, batch.params, alpha=decay))
                sums = self._state_of(members, "sum")
                torch._foreach_addcmul_(sums, grads, grads, value=1.0)
                denominators = torch._foreach_sqrt(sums)
                torch._foreach_add_(denominators, group["eps"])
                updates = torch._foreach_div(grads, denominators)
                if decay and self.adagrad_w_mode:
                    torch._foreach_add_(updates, batch.params, alpha=decay)
                torch._foreach_mul_(updates, on_device(group["lr"], batch.device))
                torch._foreach_sub_(batch.params, updates)
