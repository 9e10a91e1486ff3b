# SPDX-License-Identifier: BSD-3-Clause
"""LARC: layer-wise adaptive rate control around any optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from apex._internal.dtypes import alike
from apex._internal.wrapped_optimizer import WrappedOptimizer


class LARC(WrappedOptimizer):
    """Adapt the learning rate of every parameter to the ratio of its norm to its gradient's.

    Algorithm: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
    equation 6, with clipping. For a parameter p with gradient g, weight decay w and group learning
    rate lr, with both norms above zero::

        local = trust_coefficient * |p| / (|g| + w * |p| + eps)
        g <- (g + w * p) * (min(local / lr, 1) if clip else local)

    Then the wrapped optimizer steps with weight decay 0. A parameter whose norm or gradient norm is
    zero keeps its gradient and gets no weight decay. Groups, state, defaults and learning rates are
    those of the wrapped optimizer (``optim``): schedulers, checkpoints and :mod:`apex.amp` work on
    either object.

    Args:
        optimizer: the optimizer to wrap; dense real gradients only.
        trust_coefficient: positive and finite.
        clip: scale the learning rate down only (LARC). False: by the local rate times lr (LARS).
        eps: finite, and not negative.

    Raises:
        ValueError: for a trust_coefficient or eps outside of these ranges.

    Not thread safe. :meth:`step` copies nothing to the host.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"LARC wraps an optimizer, got {type(optimizer).__name__}.")
        if not 0 < trust_coefficient < math.inf:
            raise ValueError(
                f"LARC: trust_coefficient is {trust_coefficient}; it must be positive and finite."
            )
        if not 0 <= eps < math.inf:
            raise ValueError(f"LARC: eps is {eps}; it must be finite and not negative.")
        super().__init__(optimizer)
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optim", "trust_coefficient", "clip", "eps")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, by default as the wrapped optimizer does."""
        self.optim.zero_grad(*(() if set_to_none is None else (set_to_none,)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adapt the gradients in place and run the wrapped optimizer's step.

        Args:
            closure: passed on; the gradients are adapted after each evaluation.

        Raises:
            ValueError: a gradient is sparse, complex or of integers. Nothing was changed then.
        """
        decays = [group.get("weight_decay", 0) for group in self.param_groups]
        wrapped = closure
        if closure is None:
            self._adapt(decays)
        else:

            def wrapped() -> Any:
                loss = closure()
                self._adapt(decays)
                return loss

        for group in self.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0
        try:
            return self.optim.step() if wrapped is None else self.optim.step(wrapped)
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay

    @torch.no_grad()
    def _adapt(self, decays: list[Any]) -> None:
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                grad = param.grad
                dense = grad is None or grad.layout == torch.strided
                if grad is not None and not (dense and grad.is_floating_point()):
                    raise ValueError(
                        f"LARC needs dense real gradients; parameter {index} of group {number} has "
                        f"a {grad.dtype} one{'' if dense else ' that is sparse'}. Give such "
                        "parameters to another optimizer."
                    )
        for group, decay in zip(self.param_groups, decays, strict=True):
            for params in alike(group["params"]):
                sign = -1 if group.get("maximize") else 1  # of the gradient in the step
                self._adapt_alike(params, group["lr"], decay, sign)

    def _adapt_alike(self, params: list[torch.Tensor], lr: Any, decay: Any, sign: int) -> None:
        """Adapt the gradients of parameters with one device and dtype."""
        grads: list[Any] = [param.grad for param in params]
        dtype = torch.promote_types(params[0].dtype, torch.float32)
        param_norms = torch.stack(torch._foreach_norm(params, 2, dtype=dtype))
        grad_norms = torch.stack(torch._foreach_norm(grads, 2, dtype=dtype))
        factors = self.trust_coefficient * param_norms
        factors = factors / (grad_norms + decay * param_norms + self.eps)
        if self.clip:
            factors = (factors / lr).clamp(max=1)
        usable = (param_norms != 0) & (grad_norms != 0)
        factors = torch.where(usable, factors, 1)
        # Factors of float16 parameters may be smaller than float16's smallest number.
        wide = [grad.to(dtype) for grad in grads]
        torch._foreach_mul_(wide, list(factors.unbind()))
        if isinstance(decay, torch.Tensor) or decay != 0:
            shares = torch.where(usable, factors * decay * sign, 0)
            torch._foreach_addcmul_(wide, [p.to(dtype) for p in params], list(shares.unbind()))
        if wide[0] is not grads[0]:
            torch._foreach_copy_(grads, wide)
