# SPDX-License-Identifier: BSD-3-Clause
"""SGD with momentum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim.sgd import sgd

from ._foreach import Batch, ForeachOptimizer, fits_fused_kernel


class FusedSGD(ForeachOptimizer):
    """torch's fused SGD that also handles parameters torch's kernel gets wrong.

    These are slices of larger tensors, which torch's foreach operators update, and float16 and
    bfloat16 parameters on the CPU (pytorch#191763). Low-precision parameters are updated in float32
    and rounded once, and their momentum is float32.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as in torch.
        wd_after_momentum: must be False.
        materialize_master_grads: accepted and ignored.
        set_grad_none: True: ``zero_grad()`` sets gradients to None, as it does by default.

    The first step of a parameter sets its momentum to the gradient, without dampening. Not thread
    safe.

    Raises:
        ValueError: a setting that torch's implementation does not have, or a negative one.
    """

    _own_settings = ("set_grad_none",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        del materialize_master_grads, set_grad_none
        if wd_after_momentum:
            raise ValueError(
                "FusedSGD is torch.optim.SGD here, which applies weight decay before momentum; "
                "pass wd_after_momentum=False."
            )
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("FusedSGD: nesterov requires a momentum above 0 and no dampening.")
        self.set_grad_none = True
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    def _update(self) -> None:
        for group in self.param_groups:
            for members, batch in self._batches(group):
                if not group["momentum"]:
                    self._run(group, batch, [None] * len(members), range(len(members)))
                    continue
                present = [self.state[p].get("momentum_buffer") for p in members]
                # torch's function takes one flag for the first step, for all tensors of a call.
                fresh = [momentum is None for momentum in present]
                for first in (True, False):
                    chosen = [i for i, new in enumerate(fresh) if new == first]
                    if chosen:
                        self._run(group, batch, present, chosen)
                for param, momentum in zip(members, present, strict=True):
                    self.state[param]["momentum_buffer"] = momentum

    def _run(
        self,
        group: dict[str, Any],
        batch: Batch,
        momenta: list[Any],
        chosen: Sequence[int],
    ) -> None:
        params = [batch.params[i] for i in chosen]
        grads = [batch.grads[i] for i in chosen]
        own = [momenta[i] for i in chosen]
        fused = fits_fused_kernel(params, grads, *([own] if own[0] is not None else []))
        sgd(
            params,
            grads,
            own,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"] if fused else float(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
            foreach=not fused,
            fused=fused,
        )
        for index, momentum in zip(chosen, own, strict=True):
            momenta[index] = momentum
