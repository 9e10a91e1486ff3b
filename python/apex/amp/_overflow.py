# SPDX-License-Identifier: BSD-3-Clause
"""The decision to skip a step after a gradient overflow."""

from __future__ import annotations

from typing import Any

from ._amp_state import maybe_print
from ._optimizer_stash import OptimizerStash
from .scaler import LossScaler


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
    if scaler.update_scale():
        for stash in stashes:
            _skip_next_step(stash, loss_id, scaler)


def check_deferred(stash: OptimizerStash) -> None:
    """Before a step, evaluate the overflows of contexts with ``delay_overflow_check``."""
    for scaler, loss_id in list(stash.deferred.items()):
        check_overflow(scaler.take_deferred(), loss_id, scaler, ranks(scaler))
