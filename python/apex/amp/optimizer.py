# SPDX-License-Identifier: BSD-3-Clause
"""amp's state and methods of one optimizer: master weights, gradients, skipped steps.

Note [One gradient]
The model's gradient is the only one. Entering a ``scale_loss`` context multiplies the existing
gradients in place, so that they have the scale of the loss and backward can add to them. A
data-parallel wrapper that has not averaged them yet (``no_sync``) then averages the sum. Leaving
the context divides float32 gradients again. Low-precision gradients stay scaled, and the gradients
of their master weights are overwritten with the unscaled values. The attribute ``_amp_scale`` of a
parameter is the scale of its gradient if that is scaled, so optimizers may share a parameter.

Note [One home for master weights]
A master weight starts from the rounded parameter and is saved in the optimizer's state dict. So
values do not depend on the number of ranks, and ranks whose parameters are equal have equal master
weights. From the first step on, the master weight is authoritative. Code that writes into the
parameter (a load, a broadcast, the end of an average) moves its version; the elements of the master
weight that no longer round to the parameter's then take the parameter's values. Until the first
step and after a load, every context does this, because writes through ``.data`` move no version.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .._internal import joining, not_served
from .._internal.dtypes import is_low_precision
from .._internal.optimizer_steps import MODEL_PARAMETER
from ..multi_tensor_apply._operations import wide_copies
from ._amp_state import _amp_state, maybe_print, several_ranks
from .casting import AmpHandle
from .scaler import LossScaler

#: The key in the optimizer's state under which master weights are saved by parameter index.
MASTER_WEIGHTS = "amp_master_weights"

#: A step raises after this number of consecutive closure evaluations that overflow.
MAX_CLOSURE_RETRIES = 100

_SCALE = "_amp_scale"


def _this_rank() -> str:
    return f"rank {torch.distributed.get_rank()}: " if several_ranks() else ""


def _values_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The existing gradients, as dense tensors. Coalesces sparse ones."""
    values = []
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if grad.is_sparse:
            param.grad = grad = grad.coalesce()
            grad = grad._values()
        values.append(grad)
    return values


def _multiply_(grads: list[torch.Tensor], factor: float) -> None:
    """Multiply `grads` in place, in float32 or wider: a scale may exceed the range of their
    dtype."""
    low = [grad for grad in grads if is_low_precision(grad)]
    if low:
        wide = wide_copies(low, torch.float32)
        torch._foreach_mul_(wide, factor)
        torch._foreach_copy_(low, wide)
    if len(low) < len(grads):
        torch._foreach_mul_([grad for grad in grads if not is_low_precision(grad)], factor)


def _written(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, tensor.data_ptr()


class _Master:
    """A low-precision parameter and its float32 master weight."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.weight: torch.Tensor = torch.nn.Parameter(parameter.detach().float())
        setattr(self.weight, MODEL_PARAMETER, parameter)
        self.note_agreement()
        _masters[id(parameter)] = self

    def note_agreement(self) -> None:
        self._then = _written(self.parameter)
        self._weight_then = _written(self.weight)

    def parameter_moved(self) -> bool:
        """Whether the parameter was written since then, with a change of version or address."""
        return _written(self.parameter) != self._then

    def weight_moved(self) -> bool:
        return _written(self.weight) != self._weight_then

    def value(self) -> torch.Tensor:
        """The master weight where it rounds to the parameter, else the parameter, in float32."""
        weight, parameter = self.weight.detach(), self.parameter.detach()
        weight = weight.to(parameter.device)
        return torch.where(weight.to(parameter.dtype) == parameter, weight, parameter.float())


#: By the id of the parameter. A master weight lives as long as its optimizer.
_masters: weakref.WeakValueDictionary[int, _Master] = weakref.WeakValueDictionary()


def float32_value(tensor: torch.Tensor) -> torch.Tensor:
    """A new float32 tensor: the master weight of `tensor`, or its own values if it has none."""
    master = _masters.get(id(tensor))
    return tensor.detach().float() if master is None else master.value()


def refuse_sharded(what: str, tensor: torch.Tensor) -> None:
    """Raise RuntimeError for a DTensor (fully_shard, or tensor parallel)."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        raise RuntimeError(
            f"amp cannot cast {what}, which is a DTensor (fully_shard, or tensor parallel), or "
            "keep a master weight for it: use level O1, which casts no parameters, or "
            "fully_shard's MixedPrecisionPolicy."
        )


class OptimizerStash:
    """Amp's state for one optimizer, at ``optimizer._amp_stash``.

    With master weights, it replaces each trained low-precision parameter in ``param_groups`` by a
    float32 master weight.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        master_weights: bool,
        scalers: list[LossScaler],
    ) -> None:
        self._optimizer = optimizer
        self.master_weights = master_weights
        #: The scalers of the optimizer's ``initialize``, by ``loss_id``.
        self.scalers = scalers
        self.lazy_init_called = False
        #: The next step is skipped.
        self.already_patched = False
        self._skipped: tuple[int, LossScaler] = 0, scalers[0]
        #: ``delay_unscale`` has left gradients scaled.
        self.params_have_scaled_gradients = False
        self.in_context = False
        #: No step was made since master weights were created or loaded.
        self._fresh = True
        #: By the id of the master weight.
        self._masters: dict[int, _Master] = {}
        #: Low-precision parameters of the model, their master weights, and other trained
        #: parameters; one list per group, and all together.
        self.fp16_groups: list[list[torch.Tensor]] = []
        self.fp32_from_fp16_groups: list[list[torch.Tensor]] = []
        self.fp32_from_fp32_groups: list[list[torch.Tensor]] = []
        self.all_fp16_params: list[torch.Tensor] = []
        self.all_fp32_from_fp16_params: list[torch.Tensor] = []
        self.all_fp32_from_fp32_params: list[torch.Tensor] = []

    @property
    def all_fp32_params(self) -> list[torch.Tensor]:
        """The trained parameters of other dtypes than float16 and bfloat16."""
        return self.all_fp32_from_fp32_params

    # --- master weights ---

    def lazy_init(self) -> None:
        """Create the master weights, unless they exist."""
        if not self.lazy_init_called:
            self.collect()

    def collect(self) -> None:
        """Read ``param_groups`` again, and create master weights for new parameters."""
        self.lazy_init_called = True
        self.fp16_groups, self.fp32_from_fp16_groups, self.fp32_from_fp32_groups = [], [], []
        for group in self._optimizer.param_groups:
            low: list[torch.Tensor] = []
            masters: list[torch.Tensor] = []
            others: list[torch.Tensor] = []
            params = group["params"]
            for index, param in enumerate(params):
                master = self._masters.get(id(param))
                if master is not None:
                    low.append(master.parameter)
                    masters.append(param)
                elif not param.requires_grad:
                    continue
                elif not is_low_precision(param):
                    others.append(param)
                else:
                    low.append(param)
                    if self.master_weights:
                        params[index] = self._make_master(param)
                        masters.append(params[index])
            self.fp16_groups.append(low)
            self.fp32_from_fp16_groups.append(masters)
            self.fp32_from_fp32_groups.append(others)
        self.all_fp16_params = [p for group in self.fp16_groups for p in group]
        self.all_fp32_from_fp16_params = [p for group in self.fp32_from_fp16_groups for p in group]
        self.all_fp32_from_fp32_params = [p for group in self.fp32_from_fp32_groups for p in group]

    def _make_master(self, param: torch.Tensor) -> torch.Tensor:
        refuse_sharded("an optimizer's parameter", param)
        master = _Master(param)
        self._masters[id(master.weight)] = master
        state = getattr(self._optimizer, "state", {})  # a wrapper may have no state
        if param in state:
            state[master.weight] = {
                key: value.float() if torch.is_tensor(value) and is_low_precision(value) else value
                for key, value in state.pop(param).items()
            }
        return master.weight

    @torch.no_grad()
    def follow_model(self, every: bool = False) -> None:
        """Give master weights the values written into the model: Note [One home for master
        weights]. With `every`, also compare parameters without a new version."""
        for master in self._masters.values():
            if master.parameter_moved() or (every and not master.weight_moved()):
                master.weight.copy_(master.value())
                master.note_agreement()

    @torch.no_grad()
    def masters_to_model(self) -> None:
        """Round every master weight into its parameter, by one multi-tensor copy.

        Also for code that changes master weights directly.
        """
        if self._masters:
            torch._foreach_copy_(self.all_fp16_params, self.all_fp32_from_fp16_params)
            for master in self._masters.values():
                master.note_agreement()

    def save_masters(self, state: dict[str, Any]) -> dict[str, Any]:
        """Add the master weights to the optimizer's `state`."""
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        if self._masters:
            state[MASTER_WEIGHTS] = {
                index: self._masters[id(param)].value()
                for index, param in enumerate(params)
                if id(param) in self._masters
            }
        return state

    @torch.no_grad()
    def load_masters(self, state: dict[str, Any]) -> None:
        """Read the master weights from `state`, if it contains any.

        The next context compares them with the model, which may be loaded before or after this.
        """
        saved = state.get(MASTER_WEIGHTS, {})
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            if index not in saved or id(param) not in self._masters:
                continue
            if saved[index].shape != param.shape:
                raise ValueError(
                    f"{_this_rank()}the saved master weight of parameter {index} has the shape "
                    f"{tuple(saved[index].shape)} instead of {tuple(param.shape)}: load the state "
                    "of the same model."
                )
            param.copy_(saved[index])
            self._masters[id(param)].note_agreement()
        self._fresh = True

    @contextlib.contextmanager
    def model_in_groups(self) -> Iterator[None]:
        """Context in which ``param_groups`` holds the model's parameters."""
        groups = self._optimizer.param_groups
        lists = [(group, group["params"]) for group in groups]
        for group, params in lists:
            known = [self._masters.get(id(param)) for param in params]
            group["params"] = [
                param if master is None else master.parameter
                for param, master in zip(params, known, strict=True)
            ]
        try:
            yield
        finally:
            for group, params in lists:
                group["params"] = params

    # --- gradients: Note [One gradient] ---

    def _trained(self) -> list[torch.Tensor]:
        return self.all_fp16_params + self.all_fp32_from_fp32_params

    def _unscaled_in_place(self) -> list[torch.Tensor]:
        """The parameters without a master weight."""
        return self.all_fp32_from_fp32_params if self.master_weights else self._trained()

    @torch.no_grad()
    def prepare(self, scale: float | None = None) -> None:
        """Enter a context: give existing gradients the scale of its loss.

        Without `scale`, as scripts with their own ``scale_loss`` call it, all scalers must have
        the same scale, unless there are no gradients.
        """
        if joining.active() and self.master_weights:
            not_served.refuse(joining.WITH_AMP, RuntimeError)
        self.collect()
        self.follow_model(self._fresh)
        present = [param for param in self._trained() if param.grad is not None]
        if not present:
            return
        if scale is None:
            scales = {scaler.loss_scale() for scaler in self.scalers}
            if len(scales) > 1:
                raise RuntimeError(
                    f"{_this_rank()}_prepare_amp_backward() cannot tell which loss scale of "
                    f"{sorted(scales)} to give to the gradients of earlier losses: pass the scale."
                )
            (scale,) = scales
        if self.already_patched:  # so that an overflow counts once
            torch._foreach_zero_(_values_of(present))
        by_ratio: dict[float, list[torch.Tensor]] = {}
        for param in present:
            old = param.__dict__.get(_SCALE, 1.0)
            if old != scale:
                by_ratio.setdefault(scale / old, []).append(param)
                param.__dict__[_SCALE] = scale
        for ratio, params in by_ratio.items():
            _multiply_(_values_of(params), ratio)

    def mark(self, scale: float) -> None:
        """Record that all gradients are scaled by `scale`."""
        for param in self._trained():
            param.__dict__[_SCALE] = scale

    @torch.no_grad()
    def unscale(self, scaler: LossScaler, scale: float) -> None:
        """Leave a context: divide the marked gradients by `scale`, and check them for overflow."""
        # Of two optimizers of one parameter, the first one divides its gradient.
        marked = [p for p in self._unscaled_in_place() if p.__dict__.pop(_SCALE, None) is not None]
        targets, sources = [], []
        for master in self._masters.values():
            grad, weight = master.parameter.grad, master.weight
            if grad is None:
                weight.grad = None
                continue
            marked.append(weight)
            if grad.is_sparse:
                weight.grad = grad.float()
                continue
            present = weight.grad
            if present is None or present.is_sparse:
                weight.grad = present = torch.empty_like(grad, dtype=weight.dtype)
            targets.append(present)
            sources.append(grad)
        if targets:
            torch._foreach_copy_(targets, sources)
        scaler.unscale_(_values_of(marked), scale)
        self.params_have_scaled_gradients = False

    def post(self, scaler: LossScaler) -> None:
        """``_post_amp_backward``, for scripts with their own ``scale_loss``."""
        self.collect()
        self.mark(scaler.loss_scale())
        self.unscale(scaler, scaler.loss_scale())

    def clear_after_zero_grad(self) -> None:
        """Clear the master weights' gradients as the model's, and a pending skip."""
        self.already_patched = self.params_have_scaled_gradients = False
        for param in self._trained():
            param.__dict__.pop(_SCALE, None)  # a backward outside of contexts scales nothing
        for master in self._masters.values():
            if master.parameter.grad is None:
                master.weight.grad = None
            elif master.weight.grad is not None:
                master.weight.grad = torch.zeros_like(master.weight.grad)

    def refuse_gradients(self, params: list[Any]) -> None:
        """Raise RuntimeError if parameters that are about to be added have gradients, since nothing
        tells whether these are scaled."""
        if not self.master_weights and all(scaler.has_no_effect for scaler in self.scalers):
            return
        for index, param in enumerate(params):
            grad = getattr(param, "grad", None)
            if grad is not None and (grad.is_sparse or bool(grad.any())):
                raise RuntimeError(
                    f"{_this_rank()}parameter {index} given to "
                    f"{type(self._optimizer).__name__}.add_param_group has a gradient that may be "
                    "multiplied by the loss scale: set it to None first."
                )

    # --- steps ---

    def skip_next_step(self, scaler: LossScaler, loss_id: int) -> None:
        """Make the next step do nothing, because the gradients of a loss have overflowed."""
        self.already_patched, self._skipped = True, (loss_id, scaler)

    def before_step(self) -> None:
        """Raise if gradients are scaled, and follow what the script has done to the model."""
        if self.params_have_scaled_gradients and any(
            param.grad is not None for param in self._trained()
        ):
            raise RuntimeError(
                f"{_this_rank()}{type(self._optimizer).__name__}.step() was called with gradients "
                "that are still multiplied by the loss scale, since the last amp.scale_loss of "
                "this optimizer had delay_unscale=True. Enter the last amp.scale_loss before "
                "step() without delay_unscale, or clear the gradients with optimizer.zero_grad()."
            )
        for master in self._masters.values():
            if master.parameter.grad is None:
                master.weight.grad = None
        self.follow_model()

    def skip(self) -> None:
        """Perform a skipped step: print it, and drop the gradients of the master weights."""
        loss_id, scaler = self._skipped
        maybe_print(
            f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to "
            f"{scaler.loss_scale()}"
        )
        for weight in self.all_fp32_from_fp16_params:
            weight.grad = None
        self.already_patched = False

    def after_step(self, skipped: bool) -> None:
        """Copy the master weights to the model. Also after a skipped step: SAM restores them
        before it."""
        self._fresh = self._fresh and skipped
        self.masters_to_model()

    def inside_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure` with casts on, evaluated again after an overflow, because the step has
        begun."""
        handle = _amp_state.handle
        casts = handle.casts_enabled if isinstance(handle, AmpHandle) else contextlib.nullcontext

        def evaluate() -> Any:
            for _ in range(MAX_CLOSURE_RETRIES):
                with casts():
                    loss = closure()
                self.before_step()
                if not self.already_patched:
                    return loss
                self.already_patched = False
                for param in self._trained():
                    param.grad = None
                maybe_print("Gradient overflow in a closure; evaluating it with a lower scale.")
            raise RuntimeError(
                f"optimizer.step: the closure overflowed {MAX_CLOSURE_RETRIES} times in a row; the "
                "gradients are inf or nan at any loss scale."
            )

        return evaluate
