# SPDX-License-Identifier: BSD-3-Clause
"""Loss scaling: multiplies the loss, divides the gradients, and adapts the scale to overflows.

``apex::amp::LossScaler`` in C++ implements it. This class adds the names that scripts use.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from .. import _core
from .._internal import joining
from .._internal.group_names import name_of
from ._scaler_by_hand import SMALLEST, ScalerByHand


def _real(grad: torch.Tensor) -> torch.Tensor:
    """The real and imaginary parts of `grad`, as views (a part may be lazily negated by conj)."""
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)


def _warn_of_scales(rank: int, scales: list[float]) -> None:
    ranks: dict[float, list[str]] = {}
    for other, scale in enumerate(scales):
        ranks.setdefault(scale, []).append(str(other))
    ranks.pop(0.0, None)
    which = "; ".join(
        f"{scale:g} on {', '.join(found[:8])}{', ...' if len(found) > 8 else ''}"
        for scale, found in ranks.items()
    )
    warnings.warn(
        f"rank {rank} of {len(scales)}: the loss scales of the ranks differ ({which}), so this "
        "step is skipped and all ranks take the smallest; call amp.load_state_dict on every rank.",
        RuntimeWarning,
        stacklevel=2,
    )


class LossScaler(ScalerByHand):
    """The scaler of one loss, with the attributes that scripts use: ``loss_scale()``,
    ``_loss_scale``, ``_unskipped``, ``dynamic``.

    Args:
        loss_scale: a positive number (never changes, never skips) or ``"dynamic"``.
        init_scale: first scale of a dynamic scaler, at most `max_loss_scale`.
        scale_factor: divides the scale on overflow and multiplies it on growth.
        scale_window: number of consecutive clean iterations before the scale grows.
        min_loss_scale: lower bound of a dynamic scale; None: the smallest normal float32 number.
        max_loss_scale: upper bound of a dynamic scale.

    Raises:
        ValueError: a scale that is not positive and finite, or an unknown string.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        if self.dynamic:
            if max_loss_scale is None or not max_loss_scale > 0:
                raise ValueError(f"max_loss_scale is {max_loss_scale}; it must be positive.")
            first = min(max_loss_scale, init_scale)
        else:
            try:
                first = float(loss_scale)
            except (TypeError, ValueError):
                raise ValueError(
                    f"loss_scale is {loss_scale!r}; pass a positive number or 'dynamic'."
                ) from None
        self._policy_options = {
            "init_scale": first,
            "dynamic": self.dynamic,
            "growth_factor": scale_factor,
            "backoff_factor": 1.0 / scale_factor,
            "growth_interval": scale_window,
            "min_scale": SMALLEST if min_loss_scale is None else min_loss_scale,
            "max_scale": max_loss_scale if self.dynamic else None,
        }
        self._policy = _core.LossScaler(**self._policy_options)
        self._static = None if self.dynamic else first
        self._scale_factor = scale_factor
        #: Counts changes of the scale, to identify the scale of gradients that were left scaled.
        self._generation = 0
        #: The number of open scale_loss contexts, and the optimizers whose overflow the outermost
        #: context checks.
        self.contexts = 0
        self.to_check: list[Any] = []
        #: Optimizers of contexts with ``delay_overflow_check`` whose overflow is not evaluated yet.
        self.deferred: list[Any] = []
        #: The ranks over which ``scale_loss`` combines the overflow flag: None (all), a group, or
        #: False.
        self.overflow_group: Any = None

    def take_deferred(self) -> list[Any]:
        """The optimizers with a deferred overflow check. Clears the list."""
        stashes, self.deferred = self.deferred, []
        for stash in stashes:
            stash.deferred.pop(self, None)
        return stashes

    def loss_scale(self) -> float:
        """The current scale. If dynamic, waits for the device to copy one number to the host."""
        return self._policy.get_scale() if self._static is None else self._static

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._policy.set_scale(float(value))
        if self._static is not None:
            self._static = float(value)
        self._generation += 1

    @property
    def _unskipped(self) -> int:
        return self._policy.growth_tracker()

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._policy.set_growth_tracker(int(value))

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss.float()`` times the scale, on the loss's device. Does not block."""
        self._begin_iteration()
        return self._policy.scale(loss)

    def scale_tensor(self) -> torch.Tensor:
        """The scale as a float32 tensor ``[1]`` on its device. Later updates may change it."""
        return self._policy.scale_tensor()

    def unscale_(self, grads: Sequence[torch.Tensor]) -> None:
        """Multiply `grads` by 1/scale, rounded to float32, in place.

        If the scale is dynamic, record inf or nan in them. Floating-point and complex dtypes and
        devices may be mixed. Sparse COO gradients must be coalesced. Does not block.

        Raises:
            ValueError: a gradient of integers, or a sparse one that is not coalesced.
        """
        if self._static != 1.0:
            self._policy.unscale_([_real(grad) if grad.is_complex() else grad for grad in grads])

    def found_inf(self) -> torch.Tensor:
        """Float32 tensor ``[1]``: 1 if a gradient since the last update was not finite, else 0."""
        return self._policy.found_inf()

    def clear_overflow_state(self) -> None:
        """Clear the record of non-finite gradients since the last update."""
        self._policy.clear_found_inf()
        self._begin_iteration()

    def ranks(self, group: Any = None) -> int:
        """The number of ranks that :meth:`synchronize` involves, including this one."""
        distributed = torch.distributed
        if not self.dynamic or not distributed.is_available() or not distributed.is_initialized():
            return 1
        return distributed.get_world_size(group)

    def synchronize(
        self, group: Any = None, has_loss: bool = True, device: torch.device | None = None
    ) -> None:
        """Make the overflow flag and the scale equal on every rank of `group` (None: all ranks).

        For a dynamic scaler, one all-reduce of two numbers per rank. No communication for a static
        scaler, with one rank, or without an initialized process group. If the scales of the ranks
        differ (a state was loaded on one rank only), every rank takes the smallest one and the flag
        is set. The step is then skipped, because the average of the gradients is wrong. With the
        scale on the CPU, a RuntimeWarning names the ranks. Every rank of the group must call this
        method. It blocks the host with Gloo, and only the stream with NCCL.

        Args:
            group: see above.
            has_loss: False if this rank has scaled no loss; it participates and keeps its scale.
            device: that of the other ranks' losses, if this rank has none; default: the scale's.
        """
        if self.ranks(group) < 2:
            return
        distributed = torch.distributed
        group = distributed.group.WORLD if group is None else group
        join = joining.current()
        if join is not None:
            join.announce_overflow_flags(self, group)
        self._take_buffer()
        scale = self._policy.scale_tensor()
        # Each rank fills its own row and leaves the others zero. A scale is positive.
        rows = torch.zeros(distributed.get_world_size(group), 2, device=device or scale.device)
        if has_loss:
            mine = rows[distributed.get_rank(group)]
            mine[:1].copy_(self._policy.found_inf())
            mine[1:].copy_(scale)
        what = "all-reduce of the overflow flags and scales of a LossScaler"
        _core.all_reduce_coalesced([rows], name_of(group), 1.0, what)
        if has_loss:
            self._agree(group, scale, rows[:, 0], rows[:, 1])

    def _agree(
        self, group: Any, scale: torch.Tensor, flags: torch.Tensor, scales: torch.Tensor
    ) -> None:
        """Set the flag if any rank of `group` has set it, and take the smallest of their scales."""
        smallest = scales.masked_fill(scales == 0, math.inf).min()  # 0 marks a rank without a loss
        differ = scales.max() != smallest
        if scale.device.type == "cpu" and bool(differ):
            _warn_of_scales(torch.distributed.get_rank(group), scales.tolist())
        scale.copy_(smallest)
        self._note_overflow(torch.maximum(flags.max(), differ.float()).reshape(1))

    def update_scale_async(self) -> torch.Tensor:
        """Adapt the scale on the device and return the flag that determined it. Does not block."""
        self._take_buffer()
        self._decided = found_inf = self._policy.found_inf()
        self._policy.update()
        self._generation += 1
        return found_inf

    def update_scale(self) -> bool:
        """Adapt the scale and return whether this step must be skipped.

        If dynamic, waits for the device once, because the host needs the decision.
        """
        if not self.dynamic:
            self._policy.clear_found_inf()
            return False
        return bool(self.update_scale_async().item())

    def __getstate__(self) -> dict[str, Any]:
        return {
            "dynamic": self.dynamic,
            "_loss_scale": self.loss_scale(),
            "_unskipped": self._unskipped,
            "_scale_factor": self._scale_factor,
            "_scale_seq_len": self._scale_seq_len,
            "_min_loss_scale": self._min_loss_scale,
            "_max_loss_scale": self._max_loss_scale,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Also accepts the attributes of a scaler that Apex pickled.
        LossScaler.__init__(
            self,
            "dynamic" if state["dynamic"] else state["_loss_scale"],
            scale_factor=state.get("_scale_factor", 2.0),
            scale_window=state["_scale_seq_len"],
            min_loss_scale=state["_min_loss_scale"],
            max_loss_scale=state["_max_loss_scale"],
        )
        self._loss_scale = state["_loss_scale"]
        self._unskipped = state["_unskipped"]

    def state_dict(self) -> dict[str, float | int]:
        """``{"loss_scale": float, "unskipped": int}``, plain numbers. Waits for the device."""
        return {"loss_scale": self.loss_scale(), "unskipped": self._unskipped}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._loss_scale = float(state["loss_scale"])
        self._unskipped = int(state["unskipped"])
