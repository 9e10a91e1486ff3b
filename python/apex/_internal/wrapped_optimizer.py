# SPDX-License-Identifier: BSD-3-Clause
"""The base class of optimizers that wrap another optimizer."""

from __future__ import annotations

from typing import Any

import torch


def _of_wrapped(name: str) -> property:
    """A property that reads the attribute of this name from the wrapped optimizer."""
    return property(
        lambda self: getattr(self.optim, name),
        lambda self, value: setattr(self.optim, name, value),
        doc=f"The wrapped optimizer's {name}.",
    )


class WrappedOptimizer(torch.optim.Optimizer):
    """An optimizer that shares groups, state and defaults with the wrapped optimizer, ``optim``.

    So schedulers, checkpoints and :mod:`apex.amp` work on either object.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim = optimizer
        # Sets up the hooks of Optimizer, whose constructor would create separate groups.
        super().__setstate__({})

    param_groups: Any = _of_wrapped("param_groups")
    state: Any = _of_wrapped("state")
    defaults: Any = _of_wrapped("defaults")

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict. The wrapper has no state of its own."""
        for pre_hook in list(self._optimizer_state_dict_pre_hooks.values()):
            pre_hook(self)
        state_dict = self.optim.state_dict()
        for hook in list(self._optimizer_state_dict_post_hooks.values()):
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state dict."""
        for hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self.optim.load_state_dict(state_dict)
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"
