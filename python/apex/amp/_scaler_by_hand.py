# SPDX-License-Identifier: BSD-3-Clause
"""The interface for scripts that drive a loss scaler directly, without ``scale_loss``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _core
from ..multi_tensor_apply._operations import multi_tensor_axpby, multi_tensor_scale

#: Below it, 1/scale is infinite in float32, and gradients become nan.
SMALLEST = torch.finfo(torch.float32).tiny


class ScalerByHand:
    """The part of :class:`~apex.amp.scaler.LossScaler` that has the internal names of Apex's.

    Note [The buffer of a script]
    ``_overflow_buf`` is the buffer that the functions of ``amp_C`` set. A script that reduces
    gradients itself assigns its own buffer before ``update_scale()``. Its value counts like an
    overflow that the scaler has found; each rank uses the value of its own script. As in Apex, the
    next ``scale_loss`` of this scaler clears it.
    """

    dynamic: bool
    _policy: _core.LossScaler
    _policy_options: dict[str, Any]
    _buffer: Tensor | None = None
    #: The flag that determined the last update of the scale, on its device.
    _decided: Tensor | None = None

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: Any = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write `model_grads` divided by the scale into `master_grads`.

        If the scale is dynamic, inf and nan in `model_grads` count for the next
        :meth:`update_scale`. The two lists may hold the same tensors. Does not block.

        Args:
            model_grads, master_grads: dense gradients, of any floating-point dtypes.
            unused_scale, models_are_masters: ignored; accepted for compatibility.
            scale_override: divide by this instead of the scale.
        """
        del unused_scale, models_are_masters
        scale = self._inverse(scale_override)
        found = self._new_flag()
        multi_tensor_scale(0, found, [list(model_grads), list(master_grads)], scale)
        self._note_overflow(found)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write the sum of `model_grads`, divided by the scale, and `stashed_master_grads` into
        `master_grads`.

        inf and nan in `model_grads` count, as in :meth:`unscale`.

        Args:
            model_grads, stashed_master_grads, master_grads: dense gradients, of any floating-point
                dtypes.
            scale_override: the scales of the result, of `model_grads`, and of
                `stashed_master_grads`.
        """
        a, b = self._inverse(None), 1.0
        if scale_override is not None:
            out, present, stashed = scale_override
            a, b = out / present, out / stashed
        found = self._new_flag()
        lists = [list(model_grads), list(stashed_master_grads), list(master_grads)]
        multi_tensor_axpby(0, found, lists, a, b, 0)
        self._note_overflow(found)

    def _inverse(self, override: float | None) -> Any:
        scale = self._policy.scale_tensor() if override is None else override
        return 1.0 / scale

    def _new_flag(self) -> Tensor:
        return torch.zeros(1, device=self._policy.scale_tensor().device)

    def _note_overflow(self, found: Tensor) -> None:
        """Report an overflow to the next update of the scale if `found`, ``[1]``, is not 0."""
        if self.dynamic:
            marks = torch.zeros_like(found, dtype=torch.float32)
            self._policy.unscale_([marks.masked_fill_(found != 0, math.inf)])

    @property
    def _overflow_buf(self) -> Tensor:
        """See Note [The buffer of a script]."""
        if self._buffer is None:
            self._buffer = self._new_flag().int()
        return self._buffer

    @_overflow_buf.setter
    def _overflow_buf(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def _take_buffer(self) -> None:
        if self._buffer is not None:
            self._note_overflow(self._buffer.reshape(-1))

    def _begin_iteration(self) -> None:
        """Clear the value that a script has set in the previous iteration."""
        self._decided = None
        if self._buffer is not None:
            self._buffer.zero_()

    @property
    def _has_overflow(self) -> bool:
        """Whether an overflow was found that the next update will use, or that the last one used.

        Waits for the device. Setting it determines whether the next update skips its step.
        """
        if not self.dynamic:
            return False
        flags = [self._policy.found_inf(), self._decided, self._buffer]
        return any(flag is not None and bool(flag.any()) for flag in flags)

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._policy.clear_found_inf()
        self._begin_iteration()
        if value:
            self._note_overflow(self._new_flag() + 1)

    def _set_option(self, name: str, value: Any) -> None:
        options = {**self._policy_options, name: value}
        if options["max_scale"] is not None:
            options["init_scale"] = min(options["init_scale"], options["max_scale"])
        changed = _core.LossScaler(**options)
        changed.set_scale(self._policy.get_scale())
        changed.set_growth_tracker(
            min(self._policy.growth_tracker(), options["growth_interval"] - 1)
        )
        found = self._policy.found_inf()
        self._policy, self._policy_options = changed, options
        self._note_overflow(found)

    @property
    def _scale_seq_len(self) -> int:
        """The number of consecutive clean updates after which the scale grows."""
        interval: int = self._policy_options["growth_interval"]
        return interval

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: int) -> None:
        self._set_option("growth_interval", int(value))

    @property
    def _min_loss_scale(self) -> float | None:
        """The lower bound of a dynamic scale, from its next update on."""
        lowest: float = self._policy_options["min_scale"]
        return None if lowest == SMALLEST else lowest

    @_min_loss_scale.setter
    def _min_loss_scale(self, value: float | None) -> None:
        self._set_option("min_scale", SMALLEST if value is None else value)

    @property
    def _max_loss_scale(self) -> float | None:
        """The upper bound of a dynamic scale, from its next update on. A static scale has none."""
        highest: float | None = self._policy_options["max_scale"]
        return highest

    @_max_loss_scale.setter
    def _max_loss_scale(self, value: float) -> None:
        self._set_option("max_scale", value if self.dynamic else None)
