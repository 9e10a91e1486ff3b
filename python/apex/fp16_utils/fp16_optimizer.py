# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer wrapper with float32 masters and loss scaling, which the script calls directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._internal.refused import KeepsMasterWeights
from ..amp._amp_state import is_rank_zero
from ..amp.optimizer import MAX_CLOSURE_RETRIES, OptimizerStash
from ..amp.scaler import LossScaler
from .fp16util import clip_grad_norm


def _of(owner: str, name: str, doc: str) -> property:
    """A property that reads and sets the attribute `name` of the attribute `owner`."""
    return property(
        lambda self: getattr(getattr(self, owner), name),
        lambda self, value: setattr(getattr(self, owner), name, value),
        doc=doc,
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
        self.dynamic_loss_scale = dynamic_loss_scale
        if dynamic_loss_scale:
            self.loss_scaler = LossScaler("dynamic", **(dynamic_loss_args or {}))
        else:
            self.loss_scaler = LossScaler(static_loss_scale)
        self._stash = OptimizerStash(init_optimizer, True, [self.loss_scaler])
        self._stash.collect()
        self.overflow = False
        self.first_closure_call_this_step = True
        #: The scale of the gradients, if backward() of this object was called since they were
        #: cleared.
        self._scale: float | None = None
        self.clip_grad_norm = clip_grad_norm

    overflow_group: Any = _of(
        "loss_scaler",
        "overflow_group",
        "The ranks that skip together: None (all), a process group, or False (this rank alone).",
    )
    loss_scale: Any = _of("loss_scaler", "_loss_scale", "The current loss scale; may be set.")
    state: Any = _of("optimizer", "state", "The wrapped optimizer's state.")
    param_groups: Any = _of(
        "optimizer", "param_groups", "The wrapped optimizer's groups, with the masters."
    )
    fp16_groups: Any = _of("_stash", "fp16_groups", "Low-precision parameters by group.")
    fp32_from_fp16_groups: Any = _of("_stash", "fp32_from_fp16_groups", "Their masters by group.")
    fp32_from_fp32_groups: Any = _of("_stash", "fp32_from_fp32_groups", "Others by group.")
    all_fp16_params: Any = _of("_stash", "all_fp16_params", "Low-precision parameters.")
    all_fp32_from_fp16_params: Any = _of("_stash", "all_fp32_from_fp16_params", "Their masters.")
    all_fp32_from_fp32_params: Any = _of("_stash", "all_fp32_from_fp32_params", "Others.")

    def _print(self, message: str) -> None:
        if self.verbose and is_rank_zero():
            print(message)

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803
        """Zero the gradients of the masters and of the model, or set them to None."""
        self._scale = None
        with self._stash.model_in_groups():
            self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        self._stash.clear_after_zero_grad()

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
        scale = self.loss_scaler.loss_scale()
        self._stash.prepare(scale)
        self.loss_scaler.scale(loss).backward(retain_graph=retain_graph)
        self._stash.mark(scale)
        self._scale = scale
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Copy the model's gradients to the masters, unscale them, and check for overflow.

        Sets ``overflow`` and adapts a dynamic scale. Waits for the device if the scale is dynamic.
        """
        scale = self._scale
        if scale is None:  # the script has scaled the loss itself
            scale = self.loss_scaler.loss_scale()
            self._stash.collect()
            self._stash.mark(scale)
        self._stash.unscale(self.loss_scaler, scale)
        self.loss_scaler.synchronize()
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
        self._stash.after_step(skipped=False)
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def wrapped() -> Any:
            if not self.first_closure_call_this_step:
                self._stash.masters_to_model()
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
        self._stash.collect()
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
        self._stash.masters_to_model()

    def __getstate__(self) -> Any:
        raise RuntimeError("FP16_Optimizer cannot be pickled; save its state_dict().")

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("FP16_Optimizer cannot be unpickled; use load_state_dict().")


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
