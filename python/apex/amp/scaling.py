# SPDX-License-Identifier: BSD-3-Clause
""":func:`scale_loss`, the context around a backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from apex._internal import skipped_steps

from ._amp_state import _amp_state, find_stash
from ._handle import forget_casts
from ._optimizer_stash import OptimizerStash
from ._overflow import check_overflow, ranks
from ._process_optimizer import adopt
from .scaler import LossScaler


def _stashes(optimizers: Any) -> list[OptimizerStash]:
    if not isinstance(optimizers, (list, tuple)):
        optimizers = [optimizers]
    stashes = []
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "amp.scale_loss takes an optimizer or a list of optimizers, not "
                f"{type(optimizer).__name__}."
            )
        stash = find_stash(optimizer)
        if stash is None and _amp_state.opt_properties.enabled:
            adopt(optimizer)  # created after initialize, as some scripts do
            stash = find_stash(optimizer)
        # a LARC and its inner optimizer share one stash
        if stash is not None and stash not in stashes:
            stashes.append(stash)
    return stashes


def _scaler(stash: OptimizerStash, loss_id: int) -> LossScaler:
    try:
        return stash.scalers[loss_id]
    except IndexError:
        raise RuntimeError(
            f"amp.scale_loss was called with loss_id={loss_id}, but amp.initialize was called with "
            f"num_losses={len(stash.scalers)}; pass a larger num_losses."
        ) from None


@contextlib.contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Context that yields the scaled loss; call ``backward()`` on it inside.

    Gradients of earlier contexts are kept, and backward adds to them. On exit, the gradients of the
    optimizers' parameters (or of their masters) are unscaled and the scale is adapted. After an
    overflow, the next ``step()`` of each optimizer does nothing. The overflow flag is first
    combined over the ranks, so either all ranks skip or none, and all use one scale. With a dynamic
    scale, every rank of the group must therefore exit the same number of these contexts.

    Args:
        loss: a floating-point scalar.
        optimizers: the optimizer, or list of optimizers, whose parameters get gradients from this
            loss. :class:`~apex.parallel.LARC.LARC` and optimizers created after ``initialize`` are
            accepted. With an empty list the loss is scaled, and nothing else is done.
        loss_id: which of ``num_losses`` scalers to use.
        model: ignored; kept for old scripts.
        delay_unscale: leave the gradients scaled, for a later context without it. Until then,
            ``step()`` raises RuntimeError.
        delay_overflow_check: neither adapt the scale nor skip. The next context of the same
            ``loss_id`` without this option, or the next step, counts its overflow.

    Raises:
        RuntimeError: before ``initialize``, for an unknown `loss_id`, inside another context of the
            same optimizer, or if the body destroyed the process group.
        TypeError: `loss` or `optimizers` has another type.

    If the scale is dynamic, waits for the device once.
    """
    del model
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"amp.scale_loss takes a loss tensor with a grad_fn, not a {type(loss).__name__}."
        )
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            "amp.scale_loss was called before amp.initialize; call amp.initialize first."
        )
    stashes = _stashes(optimizers)
    if not stashes:  # initialized with enabled=False, or for a script that unscales itself
        alone = isinstance(optimizers, (list, tuple)) and not optimizers
        scalers = _amp_state.latest_scalers if alone and _amp_state.opt_properties.enabled else []
        yield scalers[loss_id].scale(loss) if scalers else loss
        return
    scaler = _scaler(stashes[0], loss_id)
    entered = False
    failure: Exception | None = None  # the error of a step that all ranks skip
    try:
        scaled_before = any(stash.params_have_scaled_gradients for stash in stashes)
        masters = any(stash.master_weights for stash in stashes)
        if not masters and scaler.has_no_effect and not scaled_before:
            yield loss.float()
            return
        ranks_then = ranks(scaler)
        scaler.contexts += 1
        entered = True
        with contextlib.ExitStack() as contexts:
            claimed: set[int] = set()
            for stash in stashes:
                stash.prepare_context(stashes)
            for stash in stashes:
                stash.enter_context(scaler, claimed, delay_unscale)

                def leave(kind: Any, *_: Any, stash: OptimizerStash = stash) -> None:
                    stash.leave_context(scaler, kind is not None)

                contexts.push(leave)
            skipped = skipped_steps.count()
            try:
                yield scaler.scale(loss)
            except Exception as error:
                if skipped_steps.count() <= skipped:
                    raise
                # The other ranks did not fail, so they will exchange their overflow flags below.
                failure = error
            for stash in stashes:
                if delay_unscale:
                    stash.delay_unscale(scaler)
                else:
                    stash.finish_backward(scaler)
        if delay_overflow_check and not delay_unscale:
            for stash in stashes:
                stash.defer_check(scaler, loss_id)
        elif not delay_unscale:
            scaler.to_check += stashes
    finally:
        forget_casts()
        if entered:
            scaler.contexts -= 1
        # The scale may change now, so inner contexts of the same scaler leave this to the
        # outermost.
        if entered and scaler.to_check and scaler.contexts == 0:
            checked, scaler.to_check = scaler.to_check, []
            checked += [stash for stash in scaler.take_deferred() if stash not in checked]
            check_overflow(checked, loss_id, scaler, ranks_then)
    if failure is not None:
        raise failure
