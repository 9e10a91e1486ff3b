"""LARC: layer-wise adaptive rate control around any optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from apex.parallel._wrapped_optimizer import WrappedOptimizer


class LARC(WrappedOptimizer):
    """Adapt the learning rate of every parameter to the ratio of its norm to its gradient's.

    Algorithm: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017),
    equation 6, with clipping. For a parameter p with gradient g, weight decay w and group learning
    rate lr, with both norms above zero::

        local = trust_coefficient * |p| / (|g| + w * |p| + eps)
        g <- (g + w * p) * (min(local / lr, 1) if clip else local)

    after which the wrapped optimizer steps with weight decay 0. A parameter whose norm or gradient
    norm is zero keeps its gradient and takes no weight decay.

    Groups, state, defaults and learning rates are those of the wrapped optimizer (``optim``), so
    schedulers, checkpoints and :mod:`apex.amp` work on either object.

    Args:
        optimizer: the optimizer to wrap; dense real gradients only.
        trust_coefficient: see above.
        clip: scale the learning rate down only (LARC); False replaces it, multiplied by lr (LARS).
        eps: see above.

    Around an :class:`OverlappedOptimizer`, :meth:`step` waits for all gradients, so nothing is
    overlapped: wrap the LARC in the OverlappedOptimizer instead.

    Not thread safe. :meth:`step` copies nothing to the host.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(optimizer)
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __getstate__(self) -> dict[str, Any]:
        return {
            "optim": self.optim,
            "trust_coefficient": self.trust_coefficient,
            "clip": self.clip,
            "eps": self.eps,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adapt the gradients in place and run the wrapped optimizer's step.

        Args:
            closure: passed on; the gradients are adapted after each evaluation.

        Raises:
            RuntimeError: a gradient is sparse or complex.
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
        self.synchronize()  # an OverlappedOptimizer inside has gradients that are still reduced
        for group, decay in zip(self.param_groups, decays, strict=True):
            by_kind: dict[Any, list[torch.Tensor]] = {}
            for index, param in enumerate(group["params"]):
                if param.grad is None:
                    continue
                if param.grad.is_sparse or param.grad.is_complex():
                    raise RuntimeError(
                        f"LARC needs dense real gradients; parameter {index} of its group has a "
                        "sparse or complex one. Leave such parameters to another optimizer."
                    )
                kind = (param.device, param.dtype, param.grad.dtype)
                by_kind.setdefault(kind, []).append(param)
            for params in by_kind.values():
                self._adapt_alike(params, group["lr"], decay)

    def _adapt_alike(self, params: list[torch.Tensor], lr: Any, decay: Any) -> None:
        """Adapt the gradients of parameters of one device and type."""
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
        torch._foreach_mul_(grads, list(factors.to(grads[0].dtype).unbind()))
        if isinstance(decay, torch.Tensor) or decay != 0:
            shares = torch.where(usable, factors * decay, 0).to(params[0].dtype)
            torch._foreach_addcmul_(grads, params, list(shares.unbind()))
