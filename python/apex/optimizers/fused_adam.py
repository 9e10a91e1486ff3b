"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._choose import as_list, from_apex, implementation


class FusedAdam(torch.optim.Adam):
    """``torch.optim.Adam(fused=True)``, decoupled weight decay (AdamW) by default.

    Args:
        params, lr, betas, eps, weight_decay: as of torch.
        bias_correction: must be True.
        adam_w_mode: decoupled weight decay.
        amsgrad: must be False.
        set_grad_none: accepted; ``zero_grad`` sets gradients to None.
        capturable, master_weights: accepted; the fused step is capturable in a CUDA graph as it
            is, and masters come from :mod:`apex.amp`.

    Raises:
        ValueError: a setting that torch's implementation does not have.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        del set_grad_none, master_weights
        if amsgrad:
            raise ValueError(
                "FusedAdam has no AMSGrad variant; use torch.optim.Adam(amsgrad=True)."
            )
        if not bias_correction:
            raise ValueError(
                "FusedAdam is torch.optim.Adam here, which always corrects the bias; pass "
                "bias_correction=True."
            )
        params = as_list(params)
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adam_w_mode,
            capturable=capturable,
            **implementation(params),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, of torch's, or of Apex's class of this name."""
        super().load_state_dict(from_apex(self, state_dict))
