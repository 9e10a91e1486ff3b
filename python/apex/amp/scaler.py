# SPDX-License-Identifier: BSD-3-Clause
"""Loss scaling: multiplies the loss, divides the gradients, and adapts the scale to overflows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apex import _core

from .._internal import joining, not_served
from .._internal.group_names import name_of
from ..multi_tensor_apply._operations import multi_tensor_axpby, multi_tensor_scale

#: Below it, 1/scale is infinite in float32, and gradients become nan.
_SMALLEST = torch.finfo(torch.float32).tiny
_PICKLED = (
    "dynamic", "_loss_scale", "_unskipped", "_scale_factor", "_scale_seq_len", "_min_loss_scale",
    "_max_loss_scale",
)  # fmt: skip


def _differ(rank: int, scales: list[float]) -> RuntimeError:
    ranks: dict[float, list[str]] = {}
    for other, scale in enumerate(scales):
        ranks.setdefault(scale, []).append(str(other))
    which = "; ".join(
        f"{scale:g} on {', '.join(found[:8])}{', ...' if len(found) > 8 else ''}"
        for scale, found in ranks.items()
    )
    return RuntimeError(
        f"rank {rank} of {len(scales)}: the loss scales of the ranks differ ({which}), so the "
        "average of their gradients is wrong; call amp.load_state_dict on every rank."
    )


class LossScaler:
    """The scaler of one loss, with the attributes of Apex's, which scripts read and write.

    ``_loss_scale`` and ``_unskipped`` (clean updates since the scale changed) are plain numbers.
    ``_overflow_buf`` is the flag that the functions of ``amp_C`` set; a script that reduces
    gradients itself assigns its own before :meth:`update_scale`. ``_has_overflow`` is the last
    decision; set to True, it determines the next one. The next loss clears both.

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
        least = _SMALLEST if min_loss_scale is None else min_loss_scale
        if self.dynamic and (max_loss_scale is None or not 0 < least <= max_loss_scale):
            raise ValueError(
                f"max_loss_scale is {max_loss_scale} and min_loss_scale is {min_loss_scale}; both "
                "must be positive, and the minimum not above the maximum."
            )
        try:
            first = float(min(max_loss_scale, init_scale) if self.dynamic else loss_scale)
        except (TypeError, ValueError):
            first = math.nan
        if not 0 < first < math.inf:
            raise ValueError(f"loss_scale is {loss_scale!r}; pass a positive number or 'dynamic'.")
        self._loss_scale = first
        self._unskipped = 0
        self._scale_factor = scale_factor
        self._scale_seq_len = scale_window
        self._min_loss_scale = min_loss_scale
        self._max_loss_scale = max_loss_scale
        self._has_overflow = False
        self._overflow_buf = torch.zeros(1, dtype=torch.int32, device="cpu")
        #: By device: float32 ``[1]``, not 0 if a gradient since the last update was not finite.
        self._flags: dict[torch.device, Tensor] = {}
        self._decided = False  # the flags and _has_overflow belong to the last decision
        #: The ranks over which ``scale_loss`` combines the overflow flag: None (all), a group, or
        #: False.
        self.overflow_group: Any = None

    def loss_scale(self) -> float:
        """The current scale."""
        return self._loss_scale

    @property
    def has_no_effect(self) -> bool:
        """Whether the scale is 1 and never changes."""
        return not self.dynamic and self._loss_scale == 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """``loss.float()`` times the scale. Does not block."""
        self._begin()
        if self._overflow_buf.device != loss.device:
            self._overflow_buf = self._overflow_buf.to(loss.device)
        return loss.float() * self._loss_scale

    def unscale_(self, grads: Sequence[Tensor], scale: float | None = None) -> None:
        """Divide `grads` by `scale` (None: the current one), in place.

        If the scale is dynamic, record inf or nan in them. Floating-point and complex dtypes and
        devices may be mixed. Sparse gradients must be coalesced. Does not block.
        """
        scale = self._loss_scale if scale is None else scale
        if scale == 1.0 and not self.dynamic:
            return
        self._begin()
        parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in grads:
            values = grad._values() if grad.is_sparse else grad
            if values.is_complex():  # a part may be lazily negated by conj
                values = torch.view_as_real(values.conj() if values.is_conj() else values)
            if values.numel():
                parts.setdefault((values.device, values.dtype), []).append(values)
        with torch.no_grad():
            for (device, _), members in parts.items():
                inverse = torch.full((1,), 1.0 / scale, device=device)
                if self.dynamic:
                    flag = self._flags.setdefault(device, torch.zeros(1, device=device))
                    torch._amp_foreach_non_finite_check_and_unscale_(members, flag, inverse)
                else:
                    torch._foreach_mul_(members, inverse.squeeze(0))

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: Any = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write `model_grads` divided by the scale, or by `scale_override`, into `master_grads`.

        Sets ``_overflow_buf`` if a gradient is not finite. For scripts; does not block.
        """
        del unused_scale, models_are_masters
        self._begin()
        factor = 1.0 / (self._loss_scale if scale_override is None else scale_override)
        multi_tensor_scale(0, self._overflow_buf, [list(model_grads), list(master_grads)], factor)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write the sum of `model_grads`, divided by the scale, and `stashed_master_grads` into
        `master_grads`.

        Sets ``_overflow_buf`` if one of `model_grads` is not finite. `scale_override` has the
        scales of the result, of `model_grads`, and of `stashed_master_grads`. For scripts.
        """
        self._begin()
        out, present, stashed = scale_override or (1.0, self._loss_scale, 1.0)
        lists = [list(model_grads), list(stashed_master_grads), list(master_grads)]
        multi_tensor_axpby(0, self._overflow_buf, lists, out / present, out / stashed, 0)

    def _begin(self) -> None:
        """Clear what the last decision was made of."""
        if self._decided:
            self.clear_overflow_state()

    def found_inf(self) -> Tensor:
        """Float32 tensor ``[1]``: 1 if a gradient since the last update was not finite, else 0."""
        flags = [*self._flags.values(), self._overflow_buf.reshape(-1)[:1]]
        device = flags[0].device
        found = torch.cat([flag.to(device, torch.float32, non_blocking=True) for flag in flags])
        return found.amax().reshape(1)

    def clear_overflow_state(self) -> None:
        """Clear the record of non-finite gradients since the last update."""
        self._has_overflow = self._decided = False
        self._flags.clear()
        self._overflow_buf.zero_()

    def synchronize(self) -> None:
        """Make the overflow flag equal on every rank of ``overflow_group``, each of which must
        call this method.

        For a dynamic scaler, one all-reduce of two numbers per rank, for which the host waits. No
        communication for a static scaler, with one rank, or without an initialized process group.

        Raises:
            RuntimeError: the scales of the ranks differ, or under ``join()``.
        """
        dist = torch.distributed
        group: Any = self.overflow_group
        if not self.dynamic or group is False or not dist.is_available():
            return
        if not dist.is_initialized() or dist.get_world_size(group) < 2:
            return
        if joining.active():
            not_served.refuse(joining.WITH_AMP, RuntimeError)
        group = group or dist.group.WORLD
        found, rank = self.found_inf(), dist.get_rank(group)
        # Each rank fills its own row and leaves the others zero.
        rows = torch.zeros(dist.get_world_size(group), 2, device=found.device)
        rows[rank, :1].copy_(found)
        rows[rank, 1].fill_(self._loss_scale)
        what = "all-reduce of the overflow flags and scales of a LossScaler"
        _core.all_reduce_coalesced([rows], name_of(group), 1.0, what)
        flags, scales = rows.t().tolist()
        if min(scales) != max(scales):
            raise _differ(rank, scales)
        self.clear_overflow_state()
        self._has_overflow = any(flags)

    def update_scale(self) -> bool:
        """Adapt the scale and return whether this step must be skipped.

        If dynamic, waits for the device once, because the host needs the decision.
        """
        if not self.dynamic:
            return False
        self._has_overflow = bool(self._has_overflow) or bool(self.found_inf().item())
        self._flags.clear()
        self._decided = True
        if self._has_overflow:
            lowest = self._min_loss_scale or _SMALLEST
            self._loss_scale = max(lowest, self._loss_scale / self._scale_factor)
            self._unskipped = 0
        else:
            self._unskipped += 1
        if self._unskipped >= self._scale_seq_len:
            self._loss_scale = min(self._max_loss_scale, self._loss_scale * self._scale_factor)
            self._unskipped = 0
        return self._has_overflow

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Also accepts the attributes of a scaler that Apex pickled.
        LossScaler.__init__(self, "dynamic" if state["dynamic"] else state["_loss_scale"])
        vars(self).update({name: state[name] for name in _PICKLED if name in state})

    def state_dict(self) -> dict[str, float | int]:
        """``{"loss_scale": float, "unskipped": int}``, plain numbers."""
        return {"loss_scale": float(self._loss_scale), "unskipped": int(self._unskipped)}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._loss_scale = float(state["loss_scale"])
        self._unskipped = int(state["unskipped"])
