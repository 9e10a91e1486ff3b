# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer wrapper with float32 masters and loss scaling, which the script calls directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._internal.dtypes import is_low_precision
from .._internal.refused import KeepsMasterWeights
from ..amp._amp_state import is_rank_zero
from ..amp._full_values import follow
from ..amp._gradients import multiply_, values_of
from ..amp._process_optimizer import MAX_CLOSURE_RETRIES
from ..amp.scaler import LossScaler
from .fp16util import (
    clip_grad_norm,
    master_params_to_model_params,
    model_grads_to_master_grads,
)


class FP16_Optimizer(KeepsMasterWeights):  # noqa: N801
    """Wrap `init_optimizer` so that it updates float32 master weights of low-precision parameters.

    Call ``optimizer.backward(loss)`` instead of ``loss.backward()``. For new scripts,
    :func:`apex.amp.initialize` is the better choice.

    Args:
        init_optimizer: any torch optimizer, including :class:`~apex.parallel.LARC.LARC`. Its
            ``param_groups`` hold the masters from now on.
        static_loss_scale: the loss scale, unless dynamic.
        dynamic_loss_scale: adapt the scale and skip steps that overflow. All ranks of the
            attribute ``overflow_group`` skip together, so each of them must call
            :meth:`update_master_grads` the same number of times.
        dynamic_loss_args: keyword arguments of the dynamic scaler (``init_scale``,
            ``scale_factor``, ``scale_window``, ``min_loss_scale``, ``max_loss_scale``).
        verbose: print skipped steps, on rank 0.

    Not thread safe.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer = init_optimizer
        self.verbose = verbose
        self.all_fp16_params: list[torch.Tensor] = []
        self.all_fp32_from_fp16_params: list[torch.Tensor] = []
        self._collect()
        self.dynamic_loss_scale = dynamic_loss_scale
        if dynamic_loss_scale:
            self.loss_scaler = LossScaler("dynamic", **(dynamic_loss_args or {}))
        else:
            self.loss_scaler = LossScaler(static_loss_scale)
        #: The ranks that skip together: None (all), a process group, or False (this rank alone).
        self.overflow_group: Any = None
        self.overflow = False
        self.first_closure_call_this_step = True
        #: True if no step was made since the masters were created or loaded.
        self._masters_follow = True
        #: Gradients of float32 parameters that :meth:`update_master_grads` has unscaled, with their
        #: versions at that time.
        self._unscaled: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        #: The scale when the model's current gradients were made.
        self._scaled_by: float | None = None
        self.clip_grad_norm = clip_grad_norm

    def _collect(self) -> None:
        """Read ``param_groups`` again, and create masters for new low-precision parameters.

        Parameters may be unfrozen, or added to the wrapped optimizer, after construction.
        """
        model_of = dict(
            zip(map(id, self.all_fp32_from_fp16_params), self.all_fp16_params, strict=True)
        )
        #: Low-precision parameters, their masters, and float32 parameters; one list per group.
        self.fp16_groups: list[list[torch.Tensor]] = []
        self.fp32_from_fp16_groups: list[list[torch.Tensor]] = []
        self.fp32_from_fp32_groups: list[list[torch.Tensor]] = []
        for group in self.optimizer.param_groups:
            fp16: list[torch.Tensor] = []
            masters: list[torch.Tensor] = []
            fp32: list[torch.Tensor] = []
            params = group["params"]
            for index, param in enumerate(params):
                if not param.requires_grad and param.grad is None:
                    continue
                model = model_of.get(id(param))
                if model is None and is_low_precision(param):
                    model, params[index] = param, self._make_master(param)
                if model is None:
                    fp32.append(param)
                else:
                    fp16.append(model)
                    masters.append(params[index])
            self.fp16_groups.append(fp16)
            self.fp32_from_fp16_groups.append(masters)
            self.fp32_from_fp32_groups.append(fp32)
        self.all_fp16_params = [p for group in self.fp16_groups for p in group]
        self.all_fp32_from_fp16_params = [p for group in self.fp32_from_fp16_groups for p in group]
        self.all_fp32_from_fp32_params = [p for group in self.fp32_from_fp32_groups for p in group]

    def _make_master(self, param: torch.Tensor) -> torch.Tensor:
        master = torch.nn.Parameter(param.detach().float().clone())
        state = self.optimizer.state
        if param in state:
            state[master] = {
                key: value.float() if torch.is_tensor(value) and is_low_precision(value) else value
                for key, value in state.pop(param).items()
            }
        return master

    def _print(self, message: str) -> None:
        if self.verbose and is_rank_zero():
            print(message)

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803
        """Zero the gradients of the masters and of the model, or set them to None."""
        self._unscaled, self._scaled_by = [], None
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        for param in self.all_fp16_params:
            if set_grads_to_None or param.grad is None:
                param.grad = None
            else:
                param.grad = torch.zeros_like(param.grad)

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Scale `loss` in float32 and run its backward pass, which adds to existing gradients.

        Args:
            loss: a scalar; it is not changed.
            update_master_grads: also call :meth:`update_master_grads`. Pass False to accumulate
                several losses, or to process the model's scaled gradients first. Then call it
                yourself before :meth:`step`.
            retain_graph: as in ``Tensor.backward``.
        """
        self._match_scale()
        self.loss_scaler.scale(loss).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def _scale_ratio(self) -> float:
        """The current scale divided by that of the model's gradients."""
        scale = self.loss_scaler.loss_scale()
        return 1.0 if self._scaled_by is None else scale / self._scaled_by

    @torch.no_grad()
    def _match_scale(self) -> None:
        """Convert the gradients of earlier backward passes to the current scale."""
        self._collect()
        ratio, scale = self._scale_ratio(), self.loss_scaler.loss_scale()
        if ratio != 1.0:
            earlier = {id(param) for param, _, _ in self._unscaled}
            scaled = [p for p in self.all_fp32_from_fp32_params if id(p) not in earlier]
            multiply_(values_of(self.all_fp16_params + scaled), ratio)
        self._scaled_by = scale
        multiply_(values_of([p for p, grad, _ in self._unscaled if p.grad is grad]), scale)
        self._unscaled = []

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Copy the model's gradients to the masters, unscale them, and check for overflow.

        Sets ``overflow`` and adapts a dynamic scale. Waits for the device if the scale is dynamic.
        Until the first step, the masters take values written into the model's parameters, for
        example by a broadcast.
        """
        self._collect()
        if self._masters_follow:
            for master, param in zip(
                self.all_fp32_from_fp16_params, self.all_fp16_params, strict=True
            ):
                follow(master, param)
        model_grads_to_master_grads(self.all_fp16_params, self.all_fp32_from_fp16_params)
        done = {
            id(p) for p, grad, then in self._unscaled if p.grad is grad and grad._version == then
        }
        params = [p for p in self.all_fp32_from_fp32_params if id(p) not in done]
        grads = values_of(self.all_fp32_from_fp16_params + params)
        ratio = self._scale_ratio()
        if ratio != 1.0:
            multiply_(grads, ratio)
        self.loss_scaler.unscale_(grads)
        self._unscaled = [
            (param, param.grad, param.grad._version)
            for param in self.all_fp32_from_fp32_params
            if param.grad is not None
        ]
        if self.overflow_group is not False:
            self.loss_scaler.synchronize(self.overflow_group)
        self.overflow = self.loss_scaler.update_scale()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the wrapped optimizer's step and copy the masters to the model.

        Does nothing while ``overflow`` is set. A closure must call ``zero_grad`` and ``backward``
        of this object and return the loss. If a dynamic scale overflows in it, it is evaluated
        again.

        Raises:
            RuntimeError: the closure overflowed 100 times in a row.
        """
        if self.overflow:
            self._print(
                "Gradient overflow.  Skipping step, reducing loss scale to "
                f"{self.loss_scaler.loss_scale()}"
            )
            return None
        if closure is None:
            result = self.optimizer.step()
        else:
            result = self._step_with_closure(closure)
        self._copy_masters()
        self._masters_follow = False
        return result

    def _copy_masters(self) -> None:
        master_params_to_model_params(self.all_fp16_params, self.all_fp32_from_fp16_params)

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def wrapped() -> Any:
            if not self.first_closure_call_this_step:
                self._copy_masters()
            self.first_closure_call_this_step = False
            loss = closure()
            for _ in range(MAX_CLOSURE_RETRIES):
                if not self.overflow:
                    return loss
                self._print(
                    "Gradient overflow in a closure; evaluating it again with loss scale "
                    f"{self.loss_scaler.loss_scale()}"
                )
                loss = closure()
            raise RuntimeError(
                f"FP16_Optimizer.step: the closure overflowed {MAX_CLOSURE_RETRIES} times in a "
                "row; the gradients are inf or nan at any loss scale."
            )

        try:
            return self.optimizer.step(wrapped)
        finally:
            self.first_closure_call_this_step = True

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of all masters' gradients; call after :meth:`update_master_grads`.

        Returns:
            The norm before clipping (a tensor), or -1 after an overflow.
        """
        if self.overflow:
            return -1
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        return self.clip_grad_norm(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]] | None:
        """The unscaled gradients, one list per parameter group; None after an overflow."""
        if self.overflow:
            self._print(
                "Gradients overflowed and are invalid; call backward again before reading them."
            )
            return None
        return [
            [None if param.grad is None else param.grad.detach() for param in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume, as tensors and plain values. Tensors are not copied."""
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[m.detach() for m in group] for group in self.fp32_from_fp16_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, and copy the masters to the model.

        Raises:
            ValueError: the masters of `state_dict` do not match this optimizer's.
        """
        self._collect()
        saved = [master for group in state_dict["fp32_from_fp16"] for master in group]
        current = self.all_fp32_from_fp16_params
        if [tuple(m.shape) for m in saved] != [tuple(m.shape) for m in current]:
            raise ValueError(
                f"FP16_Optimizer.load_state_dict: the state has {len(saved)} master weights, this "
                f"optimizer has {len(current)}, or their shapes differ; load the state of the "
                "same model."
            )
        self.loss_scaler.load_state_dict(_scaler_state(state_dict["loss_scaler"]))
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for master, value in zip(current, saved, strict=True):
            master.copy_(value)
        self._copy_masters()
        self._masters_follow = True

    def __getstate__(self) -> Any:
        raise RuntimeError("FP16_Optimizer cannot be pickled; save its state_dict().")

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("FP16_Optimizer cannot be unpickled; use load_state_dict().")

    @property
    def loss_scale(self) -> float:
        """The current loss scale; may be set."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups, with the masters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value


def _scaler_state(saved: Any) -> dict[str, Any]:
    """The scaler state in `saved`, a dict or a scaler object; Apex saved two layouts."""
    if isinstance(saved, dict):
        return saved
    if hasattr(saved, "_loss_scale"):
        return {"loss_scale": saved._loss_scale, "unskipped": saved._unskipped}
    clean = getattr(saved, "cur_iter", 0) - getattr(saved, "last_overflow_iter", -1) - 1
    return {
        "loss_scale": saved.cur_scale,
        "unskipped": clean % getattr(saved, "scale_window", 1),
    }
