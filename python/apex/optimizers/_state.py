# SPDX-License-Identifier: BSD-3-Clause
"""The base of all optimizers: checks of gradients, and state wider than the parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are updated: float32, or float64 for float64."""
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
    """Base class of optimizers that keep the state of low-precision parameters in float32.

    In float16 the square of a small gradient is 0, and in bfloat16 its running average stagnates.
    torch's ``load_state_dict`` rounds a state to the dtype of the parameters, so this class loads
    the values again afterwards.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, or of Apex's class of the same name."""
        # Runs after the pre-hooks of others, so that their results are used, and before their
        # post-hooks, so that these see the final state.
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
                    # Of a type and on a device that torch supports, but shared with the source.
                    self.state[param][name] = self.state[param][name].clone()
                else:
                    self.state[param][name] = value.detach().to(
                        param.device, wide_type(param.dtype), copy=True
                    )

    def _from_apex(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """`state_dict` with Apex's entries moved to where this class keeps them."""
        return state_dict
