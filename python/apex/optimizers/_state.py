# SPDX-License-Identifier: BSD-3-Clause
"""What all optimizers share: which gradients they take, and state that is wider than parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of `dtype` are updated: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def refuse_gradients(optimizer: torch.optim.Optimizer, complex_too: bool = False) -> None:
    """Raise RuntimeError if a gradient is sparse; with `complex_too`, also if one is complex."""
    own = type(optimizer).__name__
    remedies = {"sparse": "torch.optim.SGD" if "SGD" in own else "torch.optim.SparseAdam"}
    remedies["complex"] = "torch.optim.Adam"
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            grad = param.grad
            if grad is None or not (grad.is_sparse or (complex_too and grad.is_complex())):
                continue
            kind = "sparse" if grad.is_sparse else "complex"
            raise RuntimeError(
                f"{own} does not support {kind} gradients, and parameter {index} of group {number} "
                f"has one: leave it to {remedies[kind]}."
            )


class WideState(torch.optim.Optimizer):
    """Base of optimizers that keep the state of low-precision parameters in float32.

    A square of a small gradient is 0 in float16, and its average stays where it is in bfloat16.
    torch's ``load_state_dict`` rounds a state to the type of the parameters, so this one loads the
    values again.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, or of Apex's class of this name."""
        # Within the hooks of others: what their pre-hooks return counts, and their post-hooks see
        # the state as it stays.
        loaded: dict[str, Any] = {}
        before = self.register_load_state_dict_pre_hook(lambda _, state: loaded.update(state))
        after = self.register_load_state_dict_post_hook(
            lambda _: self._load_wide(loaded), prepend=True
        )
        try:
            super().load_state_dict(self._from_apex(state_dict))
        finally:
            before.remove()
            after.remove()

    def _load_wide(self, state_dict: dict[str, Any]) -> None:
        members = [param for group in self.param_groups for param in group["params"]]
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for param, index in zip(members, saved, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    continue
                if name == "step":
                    # Of a type and on a device that torch knows, but shared with the source.
                    self.state[param][name] = self.state[param][name].clone()
                else:
                    self.state[param][name] = value.detach().to(
                        param.device, wide_type(param.dtype), copy=True
                    )

    def _from_apex(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """`state_dict` with what Apex's class keeps elsewhere in its place."""
        return state_dict
