"""What amp adds to an optimizer: lazy master weights, gradient bookkeeping, hooked methods."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._amp_state import _amp_state, maybe_print, several_ranks
from ._device_skip import step_unless
from ._full_values import FullValue, record_of
from .casts import is_low_precision
from .handle import AmpHandle, disable_casts, forget_casts
from .scaler import LossScaler

#: The key of the master weights, by the index of the parameter, in the optimizer's state.
MASTER_WEIGHTS = "amp_master_weights"

#: Evaluations of a closure that overflow in a row before a step gives up.
MAX_CLOSURE_RETRIES = 100


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
        self._skipped_step: Any = None
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
        #: Those of the latter that the present ``scale_loss`` context unscales by this optimizer.
        self._own: list[torch.Tensor] = []
        #: Gradients as they were before the present ``scale_loss`` context.
        self._before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._in_context = False
        #: Between the end of a context and the next step, or zero_grad.
        self._in_iteration = False
        #: The model's gradients include those of earlier contexts.
        self._model_has_all = False
        #: By the id of the master: the master, its parameter, and what is known of both.
        self._model_of: dict[int, tuple[torch.Tensor, torch.Tensor, FullValue]] = {}

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
        sharded = sys.modules.get("torch.distributed.tensor")
        if sharded is not None and isinstance(param, sharded.DTensor):
            raise RuntimeError(
                f"{type(self._optimizer).__name__} holds a {param.dtype} parameter that is a "
                "DTensor (fully_shard, or tensor parallel), of which amp makes no master weight: "
                "use level O1."
            )
        record = record_of(param)
        master = torch.nn.Parameter(record.read(param), requires_grad=True)
        record.master, record.remembered = master, None
        record.stepped = record.settled = False
        record.note_agreement(param)
        self._model_of[id(master)] = (master, param, record)
        state = self._optimizer.state
        if param in state:
            state[master] = {
                key: value.float() if torch.is_tensor(value) and is_low_precision(value) else value
                for key, value in state.pop(param).items()
            }
        return master

    @torch.no_grad()
    def follow_model(self) -> None:
        """Give masters that were not stepped since they were made or loaded the model's values.

        Where these are the masters, rounded, the masters stay: Note [One value, two precisions].
        Those that somebody else has written stay, too. Between scale_loss and step(), where a
        master may be decayed or clamped in a way that nobody sees, only parameters that were seen
        to change are looked at.
        """
        for master, param, record in self._model_of.values():
            if record.settled or record.master_changed():
                continue
            if record.parameter_changed(param) or not self._in_iteration:
                master.copy_(record.read(param))
                record.remembered = None
                record.note_agreement(param)

    def _refuse_changed_masters(self) -> None:
        if any(record.master_changed() for _, _, record in self._model_of.values()):
            raise RuntimeError(
                f"{_this_rank()}the master weights of {type(self._optimizer).__name__} were "
                "changed, but not by its step(), and the loss given to amp.scale_loss was computed "
                "without the change: call optimizer._master_params_to_model_params() after it, "
                "before the forward pass."
            )

    def _by_index(self) -> dict[int, tuple[torch.Tensor, FullValue]]:
        """Masters and what is known of them, by the index that the optimizer's state uses."""
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        known = [self._model_of.get(id(param)) for param in params]
        return {i: (entry[0], entry[2]) for i, entry in enumerate(known) if entry is not None}

    def save_masters(self, state: dict[str, Any]) -> None:
        """Add the masters to the optimizer's `state`: Note [What one rank knows alone]."""
        if self._model_of and several_ranks():
            self.follow_model()
            state[MASTER_WEIGHTS] = {
                index: master.detach() for index, (master, _) in self._by_index().items()
            }

    def load_masters(self, state: dict[str, Any]) -> None:
        """Take the masters from the optimizer's `state`, where there are any in it."""
        # State loaded before the masters exist would be rounded to the type of the parameters.
        self.lazy_init()
        saved = state.get(MASTER_WEIGHTS, {})
        for index, (_, record) in self._by_index().items():
            if index in saved:
                # The parameters may be loaded after this, so it is not known yet what fits.
                record.restored = saved[index].detach()
                record.note_load()

    def copy_optimizer(self, memo: dict[int, Any]) -> torch.optim.Optimizer:
        """``copy.deepcopy`` of the optimizer: its masters belong to the copies of the parameters.

        Gradients are not copied, nor is what amp remembers of them, as torch has it.
        """
        original: Any = self._optimizer
        copied: Any = object.__new__(type(original))
        memo[id(original)] = copied
        copied.__setstate__(copy.deepcopy(original.__getstate__(), memo))
        process_optimizer(copied, self.master_weights)
        stash: OptimizerStash = copied._amp_stash
        stash.lazy_init_called = self.lazy_init_called
        for master, param, record in self._model_of.values():
            new_master, new_param = copy.deepcopy((master, param), memo)
            new = record_of(new_param)
            new.master, new.restored = new_master, record.restored
            new.remembered = record.remembered
            new.stepped, new.settled = record.stepped, record.settled
            if not record.master_changed():
                new.note_agreement(new_param)
            stash._model_of[id(new_master)] = (new_master, new_param, new)
        stash.collect()
        return copied

    def enter_context(self, scaler: LossScaler, claimed: set[int]) -> None:
        """Bring the gradients there are to the scale of `scaler`, for a backward to add to them.

        Parameters whose id is in `claimed` belong to another optimizer of the context.

        Note [Gradients of earlier contexts]
        They stay where a backward adds to them, so that a data-parallel wrapper that has not
        averaged them yet (no_sync, disable_allreduce) averages the sum. Masters' gradients are
        rounded for that. With one rank no wrapper looks, and these stay in float32.

        Raises:
            RuntimeError: another context of this optimizer is open, or master weights were
                changed by hand and the model does not have them.
        """
        if self._in_context:
            raise RuntimeError(
                "amp.scale_loss was entered inside another amp.scale_loss of the same optimizer, "
                "which cannot tell their gradients apart: call backward() on the sum of the losses "
                "in one context, or leave the first one before."
            )
        self.lazy_init()
        self.collect()
        self._refuse_changed_masters()
        self.follow_model()
        self._own = [p for p in self.all_fp32_from_fp32_params if id(p) not in claimed]
        claimed.update(map(id, self._own))
        scaled = self.params_have_scaled_gradients
        kept = self._own + (self.all_fp16_params if scaled else [])
        self._before = list(zip(kept, _copies([param.grad for param in kept]), strict=True))
        self._in_context = True
        with torch.no_grad():
            if scaled:
                self._match_scale(scaler)
            else:
                self._scale_earlier(scaler)

    def leave_context(self, raised: bool) -> None:
        """End what :meth:`enter_context` began; put the gradients back if the body raised."""
        self._in_context = False
        if raised:
            for param, grad in self._before:
                param.grad = grad
        else:
            self._in_iteration = True
        self._before = []

    def _scale_earlier(self, scaler: LossScaler) -> None:
        """See Note [Gradients of earlier contexts]."""
        self._model_has_all = several_ranks()
        pairs = list(zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True))
        earlier = _copies([m.grad if self._model_has_all else None for _, m in pairs])
        for grads in (_values(self._own), [_dense(grad) for grad in earlier if grad is not None]):
            if scaler._static != 1.0:
                _multiply_(grads, scaler.scale_tensor())
            self._unspoil_(grads)
        targets, sources = [], []
        for (param, _), grad in zip(pairs, earlier, strict=True):
            present = param.grad
            if grad is None:
                param.grad = None
            elif present is None or present.is_sparse or grad.is_sparse:
                param.grad = grad.to(param.dtype)
            else:  # a data-parallel wrapper may have a view of it
                targets.append(present)
                sources.append(grad)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _unspoil_(self, grads: list[torch.Tensor]) -> None:
        """Zero `grads` if an overflow was found that will skip the step: it counts once."""
        if self.already_patched and grads:
            torch._foreach_zero_(grads)
        for flag in (self.skip_flag, getattr(self._optimizer, "found_inf", None)):
            if flag is None:
                continue
            for grad in grads:
                grad.masked_fill_(flag.to(grad.device, non_blocking=True).reshape(()) != 0, 0)

    def delay_unscale(self, scaler: LossScaler) -> None:
        """Note that the gradients are scaled by the present scale of `scaler`."""
        self.params_have_scaled_gradients = True
        self._scaled_by = (scaler, scaler._generation, scaler.scale_tensor().clone())

    def _match_scale(self, scaler: LossScaler) -> None:
        """Bring gradients that were left scaled to the present scale of `scaler`."""
        assert self._scaled_by is not None
        previous, generation, scale = self._scaled_by
        if previous is scaler and generation == scaler._generation:
            return
        ratio = scaler.scale_tensor().to(scale.device) / scale
        _multiply_(_values(self.all_fp16_params + self._own), ratio)

    def finish_backward(self, scaler: LossScaler) -> None:
        """Unscale what the context has left."""
        with torch.no_grad():
            self._finish_masters(scaler)
            scaler.unscale_(_values(self._own))
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
        if self._model_has_all:
            for master in masters:
                master.grad = None
        _accumulate(masters, fresh)

    def refuse_scaled_gradients(self) -> None:
        """Raise RuntimeError if a step would use gradients that ``delay_unscale`` left scaled."""
        if not self.params_have_scaled_gradients:
            return
        if all(p.grad is None for p in self.all_fp16_params + self.all_fp32_from_fp32_params):
            self.params_have_scaled_gradients = False  # cleared by the model's zero_grad, say
            return
        raise RuntimeError(
            f"{_this_rank()}{type(self._optimizer).__name__}.step() was called with gradients that "
            "are still multiplied by the loss scale, since the last amp.scale_loss of this "
            "optimizer had delay_unscale=True. Use the last amp.scale_loss before step() without "
            "delay_unscale, or discard the gradients by optimizer.zero_grad()."
        )

    def take_skip_flag(self) -> bool:
        """What `skip_flag` says; waits for the device if there is one. Clears it."""
        flag, self.skip_flag = self.skip_flag, None
        return flag is not None and bool(flag.item())

    def take_overflow(self) -> bool:
        """Whether the gradients overflowed, so that they must not be stepped; drops them then."""
        overflow = self.take_skip_flag() or self.already_patched
        if overflow:
            for param in self._own:
                param.grad = None
        if self.already_patched:
            self.cancel_skip()
        return overflow

    def skip_next_step(self, skip: Callable[..., None]) -> None:
        """Put the method `skip` in place of ``optimizer.step``, until :meth:`cancel_skip`."""
        optimizer: Any = self._optimizer
        self._skipped_step, self.already_patched = optimizer.step, True
        optimizer.step = types.MethodType(skip, optimizer)

    def cancel_skip(self) -> None:
        """Put ``optimizer.step`` back."""
        optimizer: Any = self._optimizer
        optimizer.step, self._skipped_step = self._skipped_step, None
        self.already_patched = False

    def drop_master_grads(self) -> None:
        """Set the gradients of all masters to None."""
        for master in self.all_fp32_from_fp16_params:
            master.grad = None

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of the model's parameters, of the masters, and what was set aside.

        An overflow among them is over as well: the next step is not skipped for it.
        """
        if self.already_patched:
            self.cancel_skip()
        self.skip_flag = None
        if getattr(self._optimizer, "found_inf", None) is not None:
            self._optimizer.found_inf = None  # type: ignore[attr-defined]
        self._before = []
        self.params_have_scaled_gradients = self._in_iteration = False
        self.drop_master_grads()
        for param in self.all_fp16_params:
            if param.grad is None or set_to_none:
                param.grad = None
            else:
                param.grad = torch.zeros_like(param.grad)

    def masters_to_model(self) -> None:
        """Round every master into its parameter; from now on the masters count.

        One multi-tensor copy. For those who change master weights themselves, too.
        """
        if self.all_fp16_params:
            with torch.no_grad():
                torch._foreach_copy_(self.all_fp16_params, self.all_fp32_from_fp16_params)
        for _, param, record in self._model_of.values():
            record.restored = None
            record.stepped = record.settled = True
            record.note_agreement(param)
        self._in_iteration = False

    def skip(self) -> None:
        """What a step does that is skipped: gradients are dropped, and the model follows.

        Usually the model has the masters' values; but who has changed the masters for one forward
        pass (SAM) and put them back counts on the step.
        """
        self.follow_model()
        self.masters_to_model()
        self.drop_master_grads()
        forget_casts()


def _this_rank() -> str:
    """The beginning of an error's message."""
    return f"rank {torch.distributed.get_rank()}: " if several_ranks() else ""


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


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """`grad`, or the values of a sparse one, which has to be coalesced."""
    return grad._values() if grad.is_sparse else grad


def _values(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients there are, as dense tensors; coalesces the sparse ones."""
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.coalesce()
    return [_dense(param.grad) for param in params if param.grad is not None]


def _multiply_(grads: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply dense `grads` by a number in place, in float32 at least."""
    wide: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        if is_low_precision(grad):  # a scale may be too large for its type
            grad.copy_(grad.float() * factor.to(grad.device, non_blocking=True))
        else:
            wide.setdefault(grad.device, []).append(grad)
    for device, members in wide.items():
        torch._foreach_mul_(members, factor.to(device, non_blocking=True).reshape(()))


def _copies(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Copies of `grads`; dense ones by one multi-tensor operation."""
    dense = [grad for grad in grads if grad is not None and not grad.is_sparse]
    copies = iter(torch._foreach_mul(dense, 1.0) if dense else ())
    return [
        grad if grad is None else grad.clone().coalesce() if grad.is_sparse else next(copies)
        for grad in grads
    ]


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


def _inside_step(closure: Callable[[], Any], stash: OptimizerStash) -> Callable[[], Any]:
    """`closure` with casts on; evaluated again after an overflow, since the step has begun."""
    handle = _amp_state.handle
    casts = handle.casts_enabled if isinstance(handle, AmpHandle) else contextlib.nullcontext

    def evaluate() -> Any:
        for _ in range(MAX_CLOSURE_RETRIES):
            with casts():
                loss = closure()
            forget_casts()  # the parameters change between two evaluations of a closure
            stash.refuse_scaled_gradients()
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

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None and stash.master_weights:
            raise RuntimeError(
                "optimizer.step(closure) is not supported with amp's master weights: the closure "
                "would compute gradients of the model's parameters, not of the masters. Call "
                "backward inside amp.scale_loss and step() without a closure, or use O1."
            )
        if closure is None:
            stash.refuse_scaled_gradients()
        call = inner if closure is None else functools.partial(inner, _inside_step(closure, stash))
        stash.follow_model()
        skip, stash.skip_flag = stash.skip_flag, None
        try:
            with disable_casts():
                result = call() if skip is None else step_unless(skip, self, call)
        finally:
            forget_casts()  # one that raises runs no hook
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
    if type(hooked.state) is dict:
        # Some scripts clear it so, and a step makes entries by looking them up.
        hooked.state = collections.defaultdict(dict, hooked.state)
    hooked._amp_stash = stash
    hooked._amp_lazy_init = stash.lazy_init
    hooked._lazy_init_maybe_master_weights = stash.lazy_init
    hooked._master_params_to_model_params = stash.masters_to_model
    _hook_step(optimizer, stash)
    _hook_zero_grad(optimizer, stash)
    _hook_add_param_group(optimizer, stash)
    hooked.__deepcopy__ = stash.copy_optimizer
    optimizer.register_state_dict_post_hook(lambda _, state: stash.save_masters(state))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: stash.load_masters(state))
