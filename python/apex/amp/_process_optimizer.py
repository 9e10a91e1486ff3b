"""What amp adds to an optimizer: lazy master weights, gradient bookkeeping, hooked methods."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._amp_state import _amp_state
from ._device_skip import step_unless
from ._full_values import full_value, remember
from .casts import is_low_precision
from .handle import AmpHandle, disable_casts
from .scaler import LossScaler


class OptimizerStash:
    """Amp's state for one optimizer, at ``optimizer._amp_stash``.

    With master weights, ``param_groups`` holds a float32 master in place of every low-precision
    parameter that requires a gradient; the gradients of the model's own parameters stay scaled,
    those of the masters and of float32 parameters are unscaled after each ``scale_loss``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, master_weights: bool) -> None:
        self._optimizer = optimizer
        self.master_weights = master_weights
        self.lazy_init_called = False
        #: ``optimizer.step`` is the one-shot method that skips.
        self.already_patched = False
        #: What the next step looks at on the device: see ``_device_skip.step_unless``.
        self.skip_flag: torch.Tensor | None = None
        #: Gradients were left scaled by ``delay_unscale``.
        self.params_have_scaled_gradients = False
        self._scaled_by: tuple[LossScaler, int, torch.Tensor] | None = None
        #: Low-precision parameters of the model, and their masters, in the same order.
        self.all_fp16_params: list[torch.Tensor] = []
        self.all_fp32_from_fp16_params: list[torch.Tensor] = []
        #: Every other parameter that requires a gradient.
        self.all_fp32_from_fp32_params: list[torch.Tensor] = []
        #: Unscaled gradients of the latter from earlier ``scale_loss`` contexts.
        self._earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._model_of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def all_fp32_params(self) -> list[torch.Tensor]:
        """The parameters without a master."""
        return self.all_fp32_from_fp32_params

    def lazy_init(self) -> None:
        """Make the masters, the first time."""
        if not self.lazy_init_called:
            self.lazy_init_called = True
            self.collect()

    def collect(self) -> None:
        """Look at ``param_groups`` again; what is new and low-precision gets a master."""
        self.all_fp16_params, self.all_fp32_from_fp16_params = [], []
        self.all_fp32_from_fp32_params = []
        for group in self._optimizer.param_groups:
            params = group["params"]
            for index, param in enumerate(params):
                if not param.requires_grad:
                    continue
                if id(param) not in self._model_of and self.master_weights:
                    if is_low_precision(param):
                        params[index] = param = self._make_master(param)
                known = self._model_of.get(id(param))
                if known is None:
                    self.all_fp32_from_fp32_params.append(param)
                else:
                    self.all_fp16_params.append(known[1])
                    self.all_fp32_from_fp16_params.append(known[0])

    def _make_master(self, param: torch.Tensor) -> torch.Tensor:
        master = torch.nn.Parameter(full_value(param).clone(), requires_grad=True)
        remember(param, master)
        self._model_of[id(master)] = (master, param)
        state = self._optimizer.state
        if param in state:
            state[master] = {
                key: value.float() if torch.is_tensor(value) and is_low_precision(value) else value
                for key, value in state.pop(param).items()
            }
        return master

    def _with_own_grads(self) -> list[torch.Tensor]:
        return self.all_fp32_from_fp32_params

    def prepare_backward(self) -> None:
        """Set earlier gradients aside, so that a backward leaves only its own, scaled."""
        self.lazy_init()
        self.collect()
        for param in self.all_fp16_params:
            param.grad = None
        self._earlier = [(p, p.grad) for p in self._with_own_grads() if p.grad is not None]
        for param, _ in self._earlier:
            param.grad = None

    def abort_backward(self) -> None:
        """Put the earlier gradients back after a backward that raised."""
        for param in self._with_own_grads():
            param.grad = None
        for param, grad in self._earlier:
            param.grad = grad
        self._earlier = []
        self.params_have_scaled_gradients = False

    def delay_unscale(self, scaler: LossScaler) -> None:
        """Note that the gradients are scaled by the present scale of `scaler`."""
        self.params_have_scaled_gradients = True
        self._scaled_by = (scaler, scaler._generation, scaler.scale_tensor().clone())

    def match_scale(self, scaler: LossScaler) -> None:
        """Bring gradients that were left scaled to the present scale of `scaler`."""
        if not self.params_have_scaled_gradients or self._scaled_by is None:
            return
        previous, generation, scale = self._scaled_by
        if previous is scaler and generation == scaler._generation:
            return
        ratio = scaler.scale_tensor().to(scale.device) / scale
        for param in self.all_fp16_params + self._with_own_grads():
            if param.grad is not None:
                param.grad.mul_(ratio.to(param.grad.device))

    def finish_backward(self, scaler: LossScaler) -> None:
        """Unscale what the backward left and add it to the earlier gradients."""
        with torch.no_grad():
            self._finish_masters(scaler)
            self._finish_own_grads(scaler)
        self.params_have_scaled_gradients = False

    def _finish_masters(self, scaler: LossScaler) -> None:
        masters, grads = [], []
        for param, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True):
            grad = param.grad
            if grad is not None:
                masters.append(master)
                grads.append(grad)
        fresh = _as_float32(grads)
        scaler.unscale_(fresh)
        _accumulate(masters, fresh)

    def _finish_own_grads(self, scaler: LossScaler) -> None:
        params = self._with_own_grads()
        for param in params:
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.coalesce()
        scaler.unscale_([param.grad for param in params if param.grad is not None])
        # Added to what the backward made, which a data-parallel wrapper may have a view of.
        _accumulate([param for param, _ in self._earlier], [grad for _, grad in self._earlier])
        self._earlier = []

    def take_skip_flag(self) -> bool:
        """What `skip_flag` says; waits for the device if there is one. Clears it."""
        flag, self.skip_flag = self.skip_flag, None
        return flag is not None and bool(flag.item())

    def drop_master_grads(self) -> None:
        """Set the gradients of all masters to None."""
        for master in self.all_fp32_from_fp16_params:
            master.grad = None

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of the model's parameters, of the masters, and what was set aside."""
        self._earlier = []
        self.params_have_scaled_gradients = False
        self.drop_master_grads()
        for param in self.all_fp16_params:
            if param.grad is None or set_to_none:
                param.grad = None
            else:
                param.grad = torch.zeros_like(param.grad)

    def masters_to_model(self) -> None:
        """Round every master into its parameter; one multi-tensor copy."""
        if self.all_fp16_params:
            with torch.no_grad():
                torch._foreach_copy_(self.all_fp16_params, self.all_fp32_from_fp16_params)


def _accumulate(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
    """Add `grads` to the gradients of `params` in place, by one multi-tensor operation."""
    targets, addends = [], []
    for param, grad in zip(params, grads, strict=True):
        present = param.grad
        if present is None:
            param.grad = grad
        elif present.is_sparse or grad.is_sparse:
            param.grad = present + grad
        else:
            targets.append(present)
            addends.append(grad)
    if targets:
        torch._foreach_add_(targets, addends)


def _as_float32(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """New float32 copies; dense ones by one multi-tensor copy."""
    if any(grad.is_sparse for grad in grads):
        return [
            grad.float().coalesce() if grad.is_sparse else grad.to(torch.float32, copy=True)
            for grad in grads
        ]
    copies = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
    if grads:
        torch._foreach_copy_(copies, grads)
    return copies


def _with_casts(closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
    handle = _amp_state.handle
    if closure is None or not isinstance(handle, AmpHandle):
        return closure

    def casting_closure() -> Any:
        with handle.casts_enabled():
            loss = closure()
        # The parameters change between two evaluations of a closure.
        handle._clear_cache()
        return loss

    return casting_closure


def _hook_step(optimizer: torch.optim.Optimizer, stash: OptimizerStash) -> None:
    inner = optimizer.step

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None and stash.master_weights:
            raise RuntimeError(
                "optimizer.step(closure) is not supported with amp's master weights: the closure "
                "would compute gradients of the model's parameters, not of the masters. Call "
                "backward inside amp.scale_loss and step() without a closure, or use O1."
            )
        call = inner if closure is None else functools.partial(inner, _with_casts(closure))
        skip, stash.skip_flag = stash.skip_flag, None
        with disable_casts():
            result = call() if skip is None else step_unless(skip, self, call)
        for name in ("found_inf", "grad_scale"):
            vars(self).pop(name, None)
        if stash.master_weights:
            stash.masters_to_model()
            stash.drop_master_grads()
        return result

    if hasattr(inner, "_wrapped_by_lr_sched"):
        # A scheduler made before initialize looks for its mark on the method it wrapped.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def _hook_zero_grad(optimizer: torch.optim.Optimizer, stash: OptimizerStash) -> None:
    inner = optimizer.zero_grad
    takes_argument = bool(inspect.signature(inner).parameters)

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        stash.lazy_init()
        if takes_argument:
            inner(set_to_none)
        else:
            inner()
        stash.zero_grad(set_to_none)

    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]


def _hook_add_param_group(optimizer: torch.optim.Optimizer, stash: OptimizerStash) -> None:
    inner = optimizer.add_param_group

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        stash.lazy_init()
        taken = {id(param) for param in stash.all_fp16_params}
        inner(param_group)
        added = self.param_groups[-1]["params"]
        if any(id(param) in taken for param in added):
            del self.param_groups[-1]
            raise ValueError(
                "A parameter of the new group is in another group of this optimizer already; "
                "each parameter may be in one group only."
            )
        stash.collect()

    optimizer.add_param_group = types.MethodType(  # type: ignore[method-assign]
        add_param_group, optimizer
    )


def process_optimizer(optimizer: torch.optim.Optimizer, master_weights: bool) -> None:
    """Attach amp's state and methods to `optimizer`.

    Masters are made at the first ``zero_grad``, ``scale_loss``, ``add_param_group`` or
    ``load_state_dict``, so that parameters may still be moved between devices before.

    Raises:
        RuntimeError: `optimizer` was processed already.
    """
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError(
            "An optimizer was passed to amp.initialize twice; pass each optimizer once."
        )
    stash = OptimizerStash(optimizer, master_weights)
    hooked: Any = optimizer
    hooked._amp_stash = stash
    hooked._amp_lazy_init = stash.lazy_init
    hooked._lazy_init_maybe_master_weights = stash.lazy_init
    hooked._prepare_amp_backward = stash.prepare_backward
    hooked._post_amp_backward = stash.finish_backward
    hooked._master_params_to_model_params = stash.masters_to_model
    _hook_step(optimizer, stash)
    _hook_zero_grad(optimizer, stash)
    _hook_add_param_group(optimizer, stash)
    # State loaded before the masters exist would be rounded to the type of the parameters.
    optimizer.register_load_state_dict_pre_hook(lambda _, __: stash.lazy_init())


def find_stash(optimizer: torch.optim.Optimizer) -> OptimizerStash | None:
    """The stash of `optimizer`, or of the optimizer it wraps (LARC), or None."""
    stash = getattr(optimizer, "_amp_stash", None)
    if stash is None and hasattr(optimizer, "optim"):
        stash = getattr(optimizer.optim, "_amp_stash", None)
    return stash
