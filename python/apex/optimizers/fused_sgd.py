# SPDX-License-Identifier: BSD-3-Clause
"""SGD with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._choose import (
    FusedWhereRight,
    from_apex,
    implementation,
    is_low_precision_on_cpu,
    laid_out_like,
    listed,
)


class FusedSGD(FusedWhereRight, torch.optim.SGD):
    """``torch.optim.SGD(fused=True)``; ``foreach=True`` for groups that torch's fused kernel
    updates wrongly: with float16 or bfloat16 parameters on the CPU (pytorch#191763), or with
    parameters that are slices of larger tensors.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: as of torch.
        wd_after_momentum: must be False.
        materialize_master_grads, set_grad_none: accepted and ignored.

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
        """Load the state of this class, of torch's, or of Apex's class of this name."""
        super().load_state_dict(from_apex(self, state_dict))

    def _is_wrong_for(self, param: torch.Tensor) -> bool:
        return super()._is_wrong_for(param) or is_low_precision_on_cpu(param)

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        momentum_buffer_list: list[torch.Tensor | None],
    ) -> bool:
        self._leave_fused(group)
        base: Any = super()
        has_sparse: bool = base._init_group(group, params, grads, momentum_buffer_list)
        if not group["fused"] or has_sparse:
            return has_sparse
        for i, param in enumerate(params):
            grads[i] = laid_out_like(grads[i], param)
        for i, buffer in enumerate(momentum_buffer_list):
            if buffer is not None:  # torch's step puts it into the state
                momentum_buffer_list[i] = laid_out_like(buffer, params[i])
        late = [i for i, buffer in enumerate(momentum_buffer_list) if buffer is None]
        if len(late) < len(momentum_buffer_list):
            # torch's kernel takes a first step for all parameters of a group or for none.
            for i in late:
                momentum_buffer_list[i] = self._buffer_before(group, params[i], grads[i])
        return has_sparse

    @torch.no_grad()
    def _buffer_before(
        self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor
    ) -> torch.Tensor:
        """The momentum from which a later step gets what a first step does, which is not damped."""
        if not group["dampening"]:
            return torch.zeros_like(grad)
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        wanted = grad if scale is None else grad / scale
        wanted = (-wanted if group["maximize"] else wanted) + group["weight_decay"] * param
        buffer: torch.Tensor = wanted * (group["dampening"] / group["momentum"])
        return buffer if found_inf is None else buffer.masked_fill_(found_inf != 0, 0)
