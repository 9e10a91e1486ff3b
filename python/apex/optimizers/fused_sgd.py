# SPDX-License-Identifier: BSD-3-Clause
"""SGD with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

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


def is_low_precision_on_cpu(tensor: Tensor) -> bool:
    """Whether torch's fused SGD would update `tensor` incorrectly.

    Its CPU kernel skips whole vectors of float16 and bfloat16 parameters and writes wrong momenta
    (pytorch#191763; torch 2.12 and 2.13 at least). The kernels of Adam and AdamW are correct.
    """
    return tensor.device.type == "cpu" and is_low_precision(tensor)


class FusedSGD(FusedOptimizer, torch.optim.SGD):
    """``torch.optim.SGD(fused=True)`` that also handles parameters torch's kernel gets wrong.

    These are float16 and bfloat16 parameters on the CPU (pytorch#191763), which are updated in
    float32 and rounded once, and slices of larger tensors. Momentum has the dtype of the parameter,
    as in Apex.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as in torch.
        wd_after_momentum: must be False.
        materialize_master_grads, set_grad_none: accepted and ignored.

    A step that ``torch.amp.GradScaler`` skips creates no momentum, so the first step that is not
    skipped sets it to the gradient. Not thread safe. :meth:`step` copies nothing to the host,
    except the flag of ``GradScaler`` if a parameter has no momentum yet.

    Raises:
        ValueError: a setting that torch's implementation does not have.
    """

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
        params = listed(params)
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            **implementation(params),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, of torch's, or of Apex's class of the same name.

        Options that select the algorithm (``maximize``) or the kernels are not loaded.
        """
        super().load_state_dict(from_apex(self, state_dict))

    # Note [The first momentum]
    #
    # A first step sets the momentum to the gradient, without dampening. torch's kernel takes one
    # flag for this, for all tensors of a call. Its momenta are uninitialized memory until the
    # kernel writes them, and a skipped step does not write them. So parameters with and without
    # momentum are passed in two calls, and while a parameter has no momentum, the host reads the
    # flag. (Initial zeros would work only without dampening: the kernel would dampen the gradient,
    # because it would not treat the next step as the first.)

    def _lacks_momentum(self, param: Tensor) -> bool:
        return self.state.get(param, {}).get("momentum_buffer") is None

    def _makes_state_of_gradients(self) -> bool:
        return any(
            bool(group["momentum"]) and any(map(self._lacks_momentum, with_gradient(group)))
            for group in self.param_groups
        )

    def _update(self, group: dict[str, Any]) -> None:
        members = with_gradient(group)
        if not group["momentum"]:
            self._run_kernel(group, members, first=False)
            return
        fresh = list(map(self._lacks_momentum, members))
        for first in (True, False):
            self._run_kernel(
                group, [p for p, new in zip(members, fresh, strict=True) if new == first], first
            )

    def _run_kernel(self, group: dict[str, Any], members: list[Tensor], first: bool) -> None:
        if not members:
            return
        grad_scale = getattr(self, "grad_scale", None)
        working = WorkingCopies()
        params, grads, momenta = [], [], []
        for member in members:
            assert member.grad is not None
            fits = not has_gaps(member) and not is_low_precision_on_cpu(member)
            param = working.parameter(member, fits)
            params.append(param)
            grads.append(working.like(member.grad, param, written=grad_scale is not None))
            if not group["momentum"]:
                continue
            momentum = None
            if not first:
                state, rounded = self.state[member], param.dtype != member.dtype
                momentum = working.like(state["momentum_buffer"], param, written=rounded)
                if not rounded:  # for example after a change of the memory format
                    state["momentum_buffer"] = momentum
            momenta.append(momentum)
        working.fill()
        sgd(
            params,
            grads,
            momenta,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            foreach=group["foreach"],
            fused=group["fused"],
            grad_scale=grad_scale,
            found_inf=getattr(self, "found_inf", None),
        )
        working.write_back()
        for member, momentum in zip(members, momenta if first else (), strict=first):
            assert momentum is not None
            self.state[member]["momentum_buffer"] = momentum.to(member.dtype)
