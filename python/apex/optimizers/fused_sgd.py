"""SGD with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._choose import as_list, implementation


class FusedSGD(torch.optim.SGD):
    """``torch.optim.SGD(fused=True)``.

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
        params = as_list(params)
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            **implementation(params),
        )
