# SPDX-License-Identifier: BSD-3-Clause
"""amp's state for one optimizer: master weights, gradients, and whether to skip a step."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ._amp_state import several_ranks
from ._gradients import (
    accumulate,
    any_nonzero,
    as_float32,
    copies_of,
    dense_values,
    largest,
    mark,
    multiply_,
    round_to_grads,
    values_of,
    zero_where_zeroed_,
)
from ._handle import forget_casts
from ._master_weights import MasterWeights, this_rank
from .scaler import LossScaler

#: Stashes whose gradients ``delay_unscale`` may have left scaled.
_left_scaled: weakref.WeakSet[OptimizerStash] = weakref.WeakSet()


class OptimizerStash(MasterWeights):
    """Amp's state for one optimizer, at ``optimizer._amp_stash``.

    The gradients of the model's low-precision parameters stay scaled. The gradients of their
    masters and of float32 parameters are unscaled after each ``scale_loss``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        master_weights: bool,
        scalers: list[LossScaler] | None = None,
    ) -> None:
        super().__init__(optimizer, master_weights)
        #: The scalers of the optimizer's ``initialize``, by ``loss_id``.
        self.scalers = [] if scalers is None else scalers
        #: ``optimizer.step`` is currently the one-shot method that skips.
        self.already_patched = False
        self._skipped_step: Any = None
        #: Scalers of contexts with ``delay_overflow_check``, with their ``loss_id``.
        self.deferred: dict[LossScaler, int] = {}
        #: ``delay_unscale`` has left gradients scaled.
        self.params_have_scaled_gradients = False
        self._scaled_by = 1.0
        #: The parameters that this optimizer unscales in the current context: float32 ones, and
        #: pairs with masters. Another optimizer unscales the parameters whose ids are in `_others`.
        self._own: list[torch.Tensor] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._others: frozenset[int] = frozenset()
        #: Parameters that had a gradient when they were added.
        self._added_with_gradient: list[torch.Tensor] = []
        #: The gradients before the current ``scale_loss`` context.
        self._before: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._in_context = False
        #: The model's gradients include those of earlier contexts.
        self._model_has_all = False

    def prepare_context(self, context: list[OptimizerStash]) -> None:
        """Process changes since the last context, before any optimizer enters the next one.

        Args:
            context: the optimizers of the next context.

        Raises:
            RuntimeError: another context of this optimizer is open, the script has changed master
                weights without copying them to the model, or the scale of a gradient is unknown.
        """
        if self._in_context:
            raise RuntimeError(
                "amp.scale_loss was entered inside another amp.scale_loss of the same optimizer, "
                "so their gradients would be mixed: call backward() on the sum of the losses in "
                "one context, or exit the first context before entering the second."
            )
        self.lazy_init()
        self.collect()
        self.refuse_changed_masters()
        self.refuse_unknown_scale()
        self.refuse_scaled_by_others(context)
        self.follow_model()
        self.follow_discarded()
        self.follow_discarded_overflow()

    def enter_context(self, scaler: LossScaler, claimed: set[int], delay_unscale: bool) -> None:
        """Convert existing gradients to the scale of `scaler`, so that backward can add to them.

        Parameters whose id is in `claimed` belong to another optimizer of the context.

        Note [Gradients of earlier contexts]
        Earlier gradients stay in the model's parameters, and backward adds to them. So a
        data-parallel wrapper that has not averaged them yet (no_sync, disable_allreduce) averages
        the sum. This requires rounding the masters' gradients. With one rank there is no averaging,
        so the masters' gradients stay in float32, unless they are left scaled or were stepped.
        Stepped gradients may still be discarded by the context's body, by ``model.zero_grad()``
        between forward and backward. After a context, the model's gradient is always the master's,
        scaled and rounded, or both are None. So clearing or zeroing the model's gradients
        (``model.zero_grad()``) discards both, and :meth:`follow_discarded` detects it, because only
        this leaves None or zeros. The exception is small numbers that round to zero: for these,
        :meth:`_note_left` records the gradients.
        """
        self._others = frozenset(claimed)
        self._claim()
        claimed.update(map(id, self._own), (id(param) for param, _ in self._pairs))
        scaled = self.params_have_scaled_gradients
        kept = self._own + (self._model_params() if scaled else [])
        self._before = list(zip(kept, copies_of([param.grad for param in kept]), strict=True))
        self._in_context = True
        with torch.no_grad():
            if scaled:
                self._match_scale(scaler)
            else:
                self._model_has_all = several_ranks() or delay_unscale or not self._in_iteration
                self._scale_earlier(scaler)

    def _claim(self) -> None:
        """Find the parameters that this optimizer unscales, and not another one of the context."""
        others = self._others
        pairs = zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True)
        self._own = [p for p in self.all_fp32_from_fp32_params if id(p) not in others]
        self._pairs = [pair for pair in pairs if id(pair[0]) not in others]

    def _model_params(self) -> list[torch.Tensor]:
        return [param for param, _ in self._pairs]

    def leave_context(self, scaler: LossScaler, raised: bool) -> None:
        """Reverse :meth:`enter_context`; restore the gradients if the body raised."""
        self._in_context = False
        if raised:
            for param, grad in self._before:
                param.grad = grad
            if not self.params_have_scaled_gradients:
                for param, master in self._pairs:
                    if master.grad is None:
                        param.grad = None
                self._write_model_grads(scaler, self._pairs)
                self._note_left()
        else:
            self._in_iteration = True
        self._before = []

    @torch.no_grad()
    def follow_discarded(self, only_seen: bool = False) -> None:
        """Discard masters' gradients if the model's gradient is None, or zero and amp did not zero
        it.

        With `only_seen`, check only gradients that the last context has left and that were written
        since then with a version change. This mode costs nothing.
        """
        models, masters, before = [], [], []
        for master, param, record in self._model_of.values():
            present, full = param.grad, master.grad
            if full is None or (only_seen and record.gradient_left[1] != mark(full)[1]):
                continue
            if present is None:
                master.grad = None
                continue
            untouched = record.gradient_left[0] == mark(present)
            if not (only_seen and untouched):
                models.append(present)
                masters.append(full)
                # Written through .data, without a version change; or zeros that amp has left.
                before.append(record.largest_left if untouched else None)
        zero_where_zeroed_(masters, models, before)

    @torch.no_grad()
    def follow_discarded_overflow(self) -> None:
        """Clear an overflow if all gradients were discarded after it, so they will not be stepped.

        With several ranks, zeros do not count as discarded. One rank may have only zeros, and all
        ranks must make the same decision.
        """
        if not self.already_patched:
            return
        grads = values_of(self.all_fp16_params + self.all_fp32_from_fp32_params)
        if grads and several_ranks():
            return
        nonzero = any_nonzero(grads)
        if nonzero is None or not nonzero.item():
            self.cancel_skip()

    def _scale_earlier(self, scaler: LossScaler) -> None:
        """See Note [Gradients of earlier contexts]."""
        earlier = copies_of([m.grad if self._model_has_all else None for _, m in self._pairs])
        values = [dense_values(grad) for grad in earlier if grad is not None]
        for grads in (values_of(self._own), values):
            if not scaler.has_no_effect:
                multiply_(grads, scaler.loss_scale())
            self._unspoil_(grads, scaler)
        round_to_grads(self._model_params(), earlier)

    def _unspoil_(self, grads: list[torch.Tensor], scaler: LossScaler) -> None:
        """Zero `grads` if a found overflow will already skip the step, so that it counts only once.

        An overflow that `scaler` has found but not evaluated is kept. It counts as one with the
        overflow of this context, and a script that sums the ranks' gradients itself and decides by
        the sum needs the inf in it.
        """
        if self.already_patched and grads:
            torch._foreach_zero_(grads)
        for flag in [other.found_inf() for other in self.deferred if other is not scaler]:
            for grad in grads:
                grad.masked_fill_(flag.to(grad.device, non_blocking=True).reshape(()) != 0, 0)

    def delay_unscale(self, scaler: LossScaler) -> None:
        """Record that the gradients are scaled by the current scale of `scaler`."""
        self.params_have_scaled_gradients = True
        _left_scaled.add(self)
        for _, master in self._pairs:  # the model holds them: Note [Gradients of earlier contexts]
            master.grad = None
        self._scaled_by = scaler.loss_scale()

    def _match_scale(self, scaler: LossScaler) -> None:
        """Convert gradients that were left scaled to the current scale of `scaler`."""
        if self._scaled_by != scaler.loss_scale():
            ratio = scaler.loss_scale() / self._scaled_by
            multiply_(values_of(self._model_params() + self._own), ratio)

    def finish_backward(self, scaler: LossScaler) -> None:
        """Unscale the gradients of the context."""
        with torch.no_grad():
            self._finish_masters(scaler)
            scaler.unscale_(values_of(self._own))
        self.params_have_scaled_gradients = False

    def _finish_masters(self, scaler: LossScaler) -> None:
        pairs = [(param, master) for param, master in self._pairs if param.grad is not None]
        fresh = as_float32([param.grad for param, _ in pairs if param.grad is not None])
        scaler.unscale_(fresh)
        earlier = []
        for pair in self._pairs:
            if self._model_has_all:
                pair[1].grad = None
            elif pair[1].grad is not None:
                earlier.append(pair)
        accumulate([master for _, master in pairs], fresh)
        del fresh
        self._write_model_grads(scaler, earlier)
        self._note_left()

    def _note_left(self) -> None:
        records, grads = [], []
        for master, param, record in self._model_of.values():
            if param.grad is not None and master.grad is not None:
                record.gradient_left = mark(param.grad), mark(master.grad)[1]
                records.append(record)
                grads.append(param.grad)
        for record, value in zip(records, largest(grads), strict=True):
            record.largest_left = value

    def _zero_masters(self) -> None:
        """Zero the masters' gradients where the model's are zero (but not None)."""
        for master, param, _ in self._model_of.values():
            if param.grad is None:
                master.grad = None
            elif master.grad is None:
                master.grad = torch.zeros_like(param.grad, dtype=master.dtype)
            else:
                master.grad = torch.zeros_like(master.grad)
        self._note_left()

    @torch.no_grad()
    def _write_model_grads(
        self, scaler: LossScaler, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Set the model's gradients to the masters' gradients, where these exist."""
        pairs = [pair for pair in pairs if pair[1].grad is not None]
        grads = copies_of([master.grad for _, master in pairs])
        if not scaler.has_no_effect:
            multiply_(
                [dense_values(grad) for grad in grads if grad is not None], scaler.loss_scale()
            )
        round_to_grads([param for param, _ in pairs], grads)

    def refuse_scaled_gradients(self) -> None:
        """Raise RuntimeError if a step would use gradients that ``delay_unscale`` left scaled."""
        if not self.params_have_scaled_gradients:
            return
        left = any_nonzero(values_of(self.all_fp16_params + self.all_fp32_from_fp32_params))
        if left is None or not left.item():  # discarded, for example by the model's zero_grad
            self.params_have_scaled_gradients = False
            self._zero_masters()
            return
        raise RuntimeError(
            f"{this_rank()}{type(self._optimizer).__name__}.step() was called with gradients that "
            "are still multiplied by the loss scale, since the last amp.scale_loss of this "
            "optimizer had delay_unscale=True. Enter the last amp.scale_loss before step() without "
            "delay_unscale, or clear the gradients with optimizer.zero_grad()."
        )

    def note_added(self, params: list[torch.Tensor]) -> None:
        """Record added parameters. It is unknown whether their current gradients are scaled."""
        self.collect()
        if self._in_context:
            before = {id(param) for param in self._own}
            self._claim()
            self._before += [(param, None) for param in self._own if id(param) not in before]
        scaling = not all(scaler.has_no_effect for scaler in self.scalers)
        masters = {id(param) for param in self.all_fp16_params}
        self._added_with_gradient += [
            param
            for param in params
            if param.grad is not None and (scaling or id(param) in masters)
        ]

    def refuse_unknown_scale(self) -> None:
        """Raise RuntimeError if a parameter was added with a gradient and still has it."""
        self._added_with_gradient = [
            param
            for param in self._added_with_gradient
            if param.grad is not None and bool(any_nonzero(values_of([param])))
        ]
        if self._added_with_gradient:
            names = ", ".join(map(self._name_of, self._added_with_gradient))
            raise RuntimeError(
                f"{this_rank()}{type(self._optimizer).__name__} got {names} from add_param_group "
                "with a gradient that may be multiplied by the loss scale: call add_param_group "
                "before amp.scale_loss, or clear the gradient first (or now, with "
                "optimizer.zero_grad())."
            )

    def refuse_scaled_by_others(self, context: list[OptimizerStash]) -> None:
        """Raise RuntimeError if another optimizer has left gradients of the same parameters scaled.

        Optimizers in `context` detect this themselves.
        """
        others = [s for s in _left_scaled if s.params_have_scaled_gradients and s not in context]
        if not others:
            return
        mine = {id(param) for param in self.all_fp16_params + self.all_fp32_from_fp32_params}
        for other in others:
            for param in other.all_fp16_params + other.all_fp32_from_fp32_params:
                if id(param) in mine and any_nonzero(values_of([param])):
                    raise RuntimeError(
                        f"{this_rank()}{self._name_of(param)} of {type(self._optimizer).__name__} "
                        "has a gradient that is still multiplied by the loss scale, since the last "
                        "amp.scale_loss of another optimizer that holds it had delay_unscale=True: "
                        "pass both optimizers to amp.scale_loss, or clear the gradient."
                    )

    def _name_of(self, param: torch.Tensor) -> str:
        for number, group in enumerate(self._optimizer.param_groups):
            for index, held in enumerate(group["params"]):
                known = self._model_of.get(id(held))
                if param is held or (known is not None and param is known[1]):
                    names = group.get("param_names")
                    named = "" if names is None else f" ({names[index]!r})"
                    return f"param_groups[{number}]['params'][{index}]{named}"
        return "a parameter"

    def take_overflow(self) -> bool:
        """Whether the gradients overflowed and must not be stepped. If so, drops them."""
        if not self.already_patched:
            return False
        for param in self._own:
            param.grad = None
        self.cancel_skip()
        return True

    def defer_check(self, scaler: LossScaler, loss_id: int) -> None:
        """Leave the overflow check to a later context or to the step."""
        if scaler not in self.deferred:
            self.deferred[scaler] = loss_id
            scaler.deferred.append(self)

    def skip_next_step(self, skip: Callable[..., None]) -> None:
        """Replace ``optimizer.step`` by the method `skip` until :meth:`cancel_skip`."""
        optimizer: Any = self._optimizer
        self._skipped_step, self.already_patched = optimizer.step, True
        optimizer.step = types.MethodType(skip, optimizer)

    def cancel_skip(self) -> None:
        """Restore ``optimizer.step``."""
        optimizer: Any = self._optimizer
        optimizer.step, self._skipped_step = self._skipped_step, None
        self.already_patched = False

    def drop_master_grads(self) -> None:
        """Set the gradients of all masters to None."""
        for master in self.all_fp32_from_fp16_params:
            master.grad = None

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear the gradients of the model and the masters, and deferred overflow checks.

        An overflow among them is cleared too, so the next step is not skipped for it.
        """
        if self.already_patched:
            self.cancel_skip()
        for scaler in self.deferred:
            scaler.deferred.remove(self)
            if not scaler.deferred:
                scaler.clear_overflow_state()
        self.deferred.clear()
        self._before = []
        self.params_have_scaled_gradients = self._in_iteration = False
        for param in self.all_fp16_params:
            if param.grad is None or set_to_none:
                param.grad = None
            else:
                param.grad = torch.zeros_like(param.grad)
        self._zero_masters()

    def skip(self) -> None:
        """Perform a skipped step: drop the gradients, and copy the masters to the model.

        The model usually has the masters' values already. Scripts that change the masters for one
        forward pass (SAM) and restore them afterwards rely on this copy.
        """
        self.follow_model()
        self.masters_to_model()
        self.drop_master_grads()
        forget_casts()
