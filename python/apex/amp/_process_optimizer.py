# SPDX-License-Identifier: BSD-3-Clause
"""The methods that amp installs on an optimizer."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ._amp_state import _amp_state, find_stash, maybe_print
from ._full_values import gets_master, record_of
from ._handle import AmpHandle, disable_casts, forget_casts
from ._optimizer_stash import OptimizerStash
from ._overflow import check_deferred
from .scaler import LossScaler

#: A step raises after this number of consecutive closure evaluations that overflow.
MAX_CLOSURE_RETRIES = 100


def _inside_step(closure: Callable[[], Any], stash: OptimizerStash) -> Callable[[], Any]:
    """`closure` with casts on, evaluated again after an overflow, because the step has begun."""
    handle = _amp_state.handle
    casts = handle.casts_enabled if isinstance(handle, AmpHandle) else contextlib.nullcontext

    def evaluate() -> Any:
        for _ in range(MAX_CLOSURE_RETRIES):
            with casts():
                loss = closure()
            forget_casts()  # the parameters change between two evaluations of a closure
            stash.refuse_scaled_gradients()
            stash.refuse_unknown_scale()
            check_deferred(stash)
            if not stash.take_overflow():
                return loss
            maybe_print("Gradient overflow in a closure; evaluating it with a lower loss scale.")
        raise RuntimeError(
            f"optimizer.step: the closure overflowed {MAX_CLOSURE_RETRIES} times in a row; the "
            "gradients are inf or nan at any loss scale."
        )

    return evaluate


def _hook_step(optimizer: torch.optim.Optimizer, stash: OptimizerStash) -> None:
    inner = optimizer.step

    def step(self: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if closure is not None and stash.master_weights:
            raise RuntimeError(
                "optimizer.step(closure) is not supported with amp's master weights: the closure "
                "would compute gradients of the model's parameters, not of the master weights. "
                "Call backward inside amp.scale_loss and step() without a closure, or use O1."
            )
        if closure is None:
            stash.refuse_scaled_gradients()
            stash.refuse_unknown_scale()
            stash.refuse_scaled_by_others([stash])
            check_deferred(stash)
            if stash.already_patched:
                return self.step(**kwargs)
            stash.follow_discarded(only_seen=True)
        given = () if closure is None else (_inside_step(closure, stash),)
        call = functools.partial(inner, *given, **kwargs)
        stash.follow_model()
        try:
            with disable_casts():
                result = call()
        finally:
            forget_casts()  # a step that raises runs no hook
        if stash.master_weights:
            stash.masters_to_model()
        return result

    if hasattr(inner, "_wrapped_by_lr_sched"):
        # A scheduler made before initialize looks for its mark on the method that it wrapped.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def _hook_zero_grad(optimizer: torch.optim.Optimizer, stash: OptimizerStash) -> None:
    inner = optimizer.zero_grad
    signature = inspect.signature(inner)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        stash.lazy_init()
        inner(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        set_to_none = {**given.arguments, **kwargs}.get("set_to_none")
        stash.zero_grad(_sets_to_none(self) if set_to_none is None else set_to_none)

    # Accelerate looks for set_to_none in it.
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [own, *signature.parameters.values()]
    zero_grad.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]


def _sets_to_none(optimizer: Any) -> bool:
    """Whether ``zero_grad()`` sets gradients to None if neither argument nor default says so."""
    while optimizer is not None:
        if hasattr(optimizer, "set_grad_none"):
            return bool(optimizer.set_grad_none)
        optimizer = getattr(optimizer, "optim", None)
    return True


def _hook_add_param_group(optimizer: torch.optim.Optimizer, stash: OptimizerStash) -> None:
    inner = optimizer.add_param_group

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        stash.lazy_init()
        taken = {id(param) for param in stash.all_fp16_params}
        inner(param_group)
        added = list(self.param_groups[-1]["params"])
        if any(id(param) in taken for param in added):
            del self.param_groups[-1]
            raise ValueError(
                "A parameter of the new group is already in another group of this optimizer; each "
                "parameter may be in only one group."
            )
        stash.note_added(added)

    optimizer.add_param_group = types.MethodType(  # type: ignore[method-assign]
        add_param_group, optimizer
    )


def _with_params(
    groups: list[dict[str, Any]], state: Any, instead: dict[int, torch.Tensor]
) -> dict[str, Any]:
    """The groups and the state of an optimizer, with the parameters of the given ids replaced."""
    return {
        "param_groups": [
            {**group, "params": [instead.get(id(param), param) for param in group["params"]]}
            for group in groups
        ],
        "state": collections.defaultdict(
            dict, {instead.get(id(param), param): value for param, value in state.items()}
        ),
    }


def _state_of_model(optimizer: Any, stash: OptimizerStash) -> Any:
    """``__getstate__`` of the optimizer, with the model's parameters instead of masters.

    The next scale_loss can then create masters for an unpickled optimizer, or for a copy made
    without ``copy.deepcopy``. The masters' values are saved with the model.
    """
    kind: Any = type(optimizer)
    state = kind.__getstate__(optimizer)
    if isinstance(state, dict) and "param_groups" in state:
        params = {id(master): param for master, param, _ in stash._model_of.values()}
        state = {**state, **_with_params(state["param_groups"], state["state"], params)}
    return state


def _hook_getstate(optimizer: Any, stash: OptimizerStash) -> None:
    while isinstance(inner := getattr(optimizer, "optim", None), torch.optim.Optimizer):
        optimizer = inner  # the inner optimizer holds the parameters
    optimizer.__getstate__ = functools.partial(_state_of_model, optimizer, stash)


def _copy_optimizer(stash: OptimizerStash, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """``copy.deepcopy`` of the optimizer. Its masters belong to the copies of the parameters.

    As in torch, gradients are not copied, and neither is amp's state about them.
    """
    original: Any = stash._optimizer
    kind: Any = type(original)
    result: torch.optim.Optimizer = object.__new__(kind)
    copied: Any = result
    memo[id(original)] = copied
    copied.__setstate__(copy.deepcopy(kind.__getstate__(original), memo))
    process_optimizer(copied, stash.master_weights, stash.scalers)
    new_stash: OptimizerStash = copied._amp_stash
    new_stash.lazy_init_called = stash.lazy_init_called
    masters = {}
    for master, param, record in stash._model_of.values():
        new_master, new_param = copy.deepcopy((master, param), memo)
        new = record_of(new_param)
        new.master, new.restored = new_master, record.restored
        new.remembered = record.remembered
        new.stepped, new.settled = record.stepped, record.settled
        new.known_to_all = record.known_to_all
        if not record.master_changed():
            new.note_agreement(new_param)
        new_stash._model_of[id(new_master)] = (new_master, new_param, new)
        masters[id(new_param)] = new_master
    # The copy of an optimizer inside a LARC holds the model's parameters: _state_of_model.
    changed = _with_params(copied.param_groups, copied.state, masters)
    for group, new_group in zip(copied.param_groups, changed["param_groups"], strict=True):
        group["params"] = new_group["params"]
    copied.state = changed["state"]
    new_stash.collect()
    return result


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


def _complete(optimizer: Any) -> None:
    """Create the attributes that torch's constructor creates. Some wrappers (Lookahead) skip it."""
    if not hasattr(optimizer, "state"):
        optimizer.state = collections.defaultdict(dict)
    for name in ("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks"):
        vars(optimizer).setdefault(name, collections.OrderedDict())


def process_optimizer(
    optimizer: torch.optim.Optimizer, master_weights: bool, scalers: list[LossScaler]
) -> None:
    """Attach amp's state and methods to `optimizer`, whose losses `scalers` scale.

    Masters are created at the first ``zero_grad``, ``scale_loss``, ``add_param_group`` or
    ``load_state_dict``, so parameters may still be moved to another device before that.

    Raises:
        RuntimeError: `optimizer` cannot have master weights.
    """
    if master_weights:
        refuse_master_weights(optimizer)
    _complete(optimizer)
    stash = OptimizerStash(optimizer, master_weights, scalers)
    hooked: Any = optimizer
    if type(hooked.state) is dict:
        # Some scripts clear the state this way, and a step creates entries by looking them up.
        hooked.state = collections.defaultdict(dict, hooked.state)
    hooked._amp_stash = stash
    hooked._amp_lazy_init = stash.lazy_init
    hooked._lazy_init_maybe_master_weights = stash.lazy_init
    hooked._master_params_to_model_params = stash.masters_to_model
    _hook_step(optimizer, stash)
    _hook_zero_grad(optimizer, stash)
    _hook_add_param_group(optimizer, stash)
    _hook_getstate(optimizer, stash)
    hooked.__deepcopy__ = functools.partial(_copy_optimizer, stash)
    optimizer.register_state_dict_post_hook(lambda _, state: stash.save_masters(state))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: stash.load_masters(state))


def adopt(optimizer: torch.optim.Optimizer) -> None:
    """Process `optimizer`, which was created after the last ``initialize``."""
    master_weights = bool(_amp_state.opt_properties.master_weights)
    process_optimizer(optimizer, master_weights, _amp_state.latest_scalers)
    _amp_state.adopt(optimizer)


def _has_groups_of(outer: Any, inner: torch.optim.Optimizer) -> bool:
    return any(group is own for group in outer.param_groups for own in inner.param_groups)


_original_load = torch.optim.Optimizer.load_state_dict


@functools.wraps(_original_load)
def _load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    properties = getattr(_amp_state, "opt_properties", None)
    if properties is not None and properties.master_weights and find_stash(self) is None:
        params = [param for group in self.param_groups for param in group["params"]]
        if any(gets_master(param) for param in params):
            around = [find_stash(o) for o in _amp_state.optimizers if _has_groups_of(o, self)]
            for stash in filter(None, around):  # creates the masters of a Lookahead around it
                stash.lazy_init()
            if not around:
                adopt(self)
    _original_load(self, state_dict)


def adopt_before_load() -> None:
    """Make ``load_state_dict`` of any optimizer of a model at O2 find its master weights.

    Before its first ``scale_loss``, torch would round an optimizer's state to the model's dtype.
    Further calls have no effect.
    """
    torch.optim.Optimizer.load_state_dict = _load_state_dict  # type: ignore[method-assign]
