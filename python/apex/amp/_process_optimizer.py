# SPDX-License-Identifier: BSD-3-Clause
"""The methods that amp installs on an optimizer."""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from .casting import disable_casts
from .optimizer import OptimizerStash
from .scaler import LossScaler


def _hook_step(optimizer: Any, stash: OptimizerStash) -> None:
    inner = optimizer.step

    def step(self: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if closure is not None and stash.master_weights:
            raise RuntimeError(
                "optimizer.step(closure) is not supported with amp's master weights: the closure "
                "would compute gradients of the model's parameters, not of the master weights. "
                "Call backward inside amp.scale_loss and step() without a closure, or use O1."
            )
        result = None
        if closure is None:
            stash.before_step()
        skipped = closure is None and stash.already_patched
        if skipped:
            stash.skip()
            # Otherwise the next scheduler step would warn that no optimizer step came before it.
            self._opt_called = True
        else:
            given = () if closure is None else (stash.inside_step(closure),)
            with disable_casts():
                result = inner(*given, **kwargs)
        stash.after_step(skipped)
        return result

    if hasattr(inner, "_wrapped_by_lr_sched"):
        # A scheduler made before initialize looks for its mark on the method that it wrapped.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)


def _hook_others(optimizer: Any, stash: OptimizerStash) -> None:
    """Replace the methods for which ``param_groups`` must hold the model's parameters, and those
    that save and load."""
    zero_grad, add_param_group = optimizer.zero_grad, optimizer.add_param_group
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    @functools.wraps(zero_grad)  # Accelerate looks for set_to_none in its signature
    def amp_zero_grad(*args: Any, **kwargs: Any) -> None:
        stash.lazy_init()
        with stash.model_in_groups():
            zero_grad(*args, **kwargs)
        stash.clear_after_zero_grad()

    @functools.wraps(add_param_group)
    def amp_add_param_group(param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        if not isinstance(params, torch.Tensor):
            params = param_group["params"] = list(params)
        stash.lazy_init()
        stash.refuse_gradients([params] if isinstance(params, torch.Tensor) else params)
        with stash.model_in_groups():
            add_param_group(param_group)
        stash.collect()

    @functools.wraps(state_dict)
    def amp_state_dict(*args: Any, **kwargs: Any) -> Any:
        return stash.save_masters(state_dict(*args, **kwargs))

    @functools.wraps(load_state_dict)
    def amp_load_state_dict(state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # Without master weights, torch would round the state to the dtype of the parameters.
        stash.collect()
        load_state_dict(state, *args, **kwargs)
        stash.load_masters(state)

    optimizer.zero_grad, optimizer.add_param_group = amp_zero_grad, amp_add_param_group
    optimizer.state_dict, optimizer.load_state_dict = amp_state_dict, amp_load_state_dict


def refuse_master_weights(optimizer: Any) -> None:
    """Raise RuntimeError for an optimizer that would not step its master weights."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    while module is not None and optimizer is not None:
        if isinstance(optimizer, module.ZeroRedundancyOptimizer):
            raise RuntimeError(
                "amp cannot keep master weights for a ZeroRedundancyOptimizer, because its inner "
                "optimizer would still step the model's parameters. Use level O1, whose parameters "
                "are float32 and need none."
            )
        optimizer = getattr(optimizer, "optim", None)


def process_optimizer(
    optimizer: torch.optim.Optimizer, master_weights: bool, scalers: list[LossScaler]
) -> None:
    """Attach amp's state and methods to `optimizer`, whose losses `scalers` scale.

    Master weights are created at the first ``zero_grad``, ``scale_loss``, ``add_param_group`` or
    ``load_state_dict``, so parameters may still be moved or broadcast before that.
    """
    hooked: Any = optimizer
    if type(getattr(optimizer, "state", None)) is dict:
        # Some scripts clear the state this way, and a step creates entries by looking them up.
        hooked.state = collections.defaultdict(dict, hooked.state)
    hooked._amp_stash = stash = OptimizerStash(optimizer, master_weights, scalers)
    hooked._amp_lazy_init = stash.lazy_init
    hooked._lazy_init_maybe_master_weights = stash.lazy_init
    hooked._master_params_to_model_params = stash.masters_to_model
    hooked._prepare_amp_backward = stash.prepare
    hooked._post_amp_backward = stash.post
    _hook_step(optimizer, stash)
    _hook_others(optimizer, stash)
