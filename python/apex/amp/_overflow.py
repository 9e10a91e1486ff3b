# SPDX-License-Identifier: BSD-3-Clause
"""The decision to skip a step after a gradient overflow."""

from __future__ import annotations

from typing import Any

import torch

from . import _device_skip
from ._amp_state import maybe_print
from ._optimizer_stash import OptimizerStash
from .scaler import LossScaler


def skips_on_device(stashes: list[OptimizerStash]) -> bool:
    """Whether every optimizer can skip a step without the host: see ``_device_skip.py``."""
    return all(
        _device_skip.takes_flag(stash._optimizer) or _device_skip.can_be_undone(stash._optimizer)
        for stash in stashes
    )


def _skip_on_device(stash: OptimizerStash, found_inf: torch.Tensor) -> None:
    optimizer: Any = stash._optimizer
    takes_flag = getattr(optimizer, "_step_supports_amp_scaling", False)
    earlier = getattr(optimizer, "found_inf", None) if takes_flag else stash.skip_flag
    if earlier is not None:
        found_inf = torch.maximum(found_inf, earlier.to(found_inf.device))
    if takes_flag:
        optimizer.grad_scale = None
        optimizer.found_inf = found_inf.reshape(())
    else:
        stash.skip_flag = found_inf


def _skip_next_step(stash: OptimizerStash, loss_id: int, scaler: LossScaler) -> None:
    """Replace ``optimizer.step``, once, by a method that only prints a message."""
    if stash.already_patched:
        return

    def skip_step(self: Any, closure: Any = None, **kwargs: Any) -> Any:
        if closure is not None:
            raise RuntimeError(
                "optimizer.step(closure) cannot be skipped after a gradient overflow; call "
                "backward inside amp.scale_loss and step() without a closure."
            )
        stash.refuse_scaled_gradients()
        check_deferred(stash)
        stash.follow_discarded()
        stash.follow_discarded_overflow()
        if not stash.already_patched:
            return self.step(**kwargs)
        maybe_print(
            f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss scale to "
            f"{scaler.loss_scale()}"
        )
        stash.skip()
        # Otherwise the next scheduler step would warn that no optimizer step came before it.
        self._opt_called = True
        stash.cancel_skip()
        return None

    stash.skip_next_step(skip_step)


def ranks(scaler: LossScaler) -> int:
    """The number of ranks over which the overflow flag is combined."""
    return 1 if scaler.overflow_group is False else scaler.ranks(scaler.overflow_group)


def check_overflow(
    stashes: list[OptimizerStash], loss_id: int, scaler: LossScaler, ranks_then: int
) -> None:
    """Adapt the scale. If a gradient overflowed, make every optimizer skip its next step.

    `ranks_then` is the result of :func:`ranks` when the context began.
    """
    if ranks(scaler) < ranks_then:
        raise RuntimeError(
            "the process group was destroyed inside amp.scale_loss, so this rank cannot report a "
            f"gradient overflow to the other {ranks_then - 1} ranks, which would not skip the "
            "step; call destroy_process_group() after training."
        )
    if ranks_then > 1:
        scaler.synchronize(scaler.overflow_group)
    if scaler.dynamic and skips_on_device(stashes):
        found_inf = scaler.update_scale_async()
        for stash in stashes:
            _skip_on_device(stash, found_inf)
        return
    overflow = scaler.update_scale()
    for stash in stashes:
        # An earlier loss of this iteration may have left its decision on the device.
        if stash.take_skip_flag() or overflow:
            _skip_next_step(stash, loss_id, scaler)


def check_deferred(stash: OptimizerStash) -> None:
    """Before a step, evaluate the overflows of contexts with ``delay_overflow_check``."""
    for scaler, loss_id in list(stash.deferred.items()):
        check_overflow(scaler.take_deferred(), loss_id, scaler, ranks(scaler))
