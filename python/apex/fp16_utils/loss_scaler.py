# SPDX-License-Identifier: BSD-3-Clause
"""Loss scalers for scripts that scale manually. :mod:`apex.amp` has its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class LossScaler:
    """A fixed loss scale.

    Args:
        scale: the factor.
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The current scale (a property here, a method in :mod:`apex.amp`)."""
        return self.cur_scale

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Always False: a static scale does not react to overflow."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing."""

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Any, ...]:
        """Backward hook that multiplies the gradients with respect to the inputs by the scale."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run ``(loss * loss_scale).backward()``. The gradients stay scaled."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that falls on overflow and grows after `scale_window` clean updates.

    Args:
        init_scale: first scale.
        scale_factor: divisor on overflow (the scale stays at least 1) and multiplier on growth.
        scale_window: the scale grows on every `scale_window`-th update since the last overflow.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether a gradient of `params` contains inf or nan. Waits for the device once."""
        grads = [param.grad for param in params if param.grad is not None]
        if not grads:
            return False
        device = grads[0].device
        finite = [torch.isfinite(_values(grad)).all().to(device) for grad in grads]
        return not bool(torch.stack(finite).all())

    def update_scale(self, overflow: bool) -> None:
        """Adapt the scale. Call once per iteration with the result of :meth:`has_overflow`."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad
