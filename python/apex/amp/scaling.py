# SPDX-License-Identifier: BSD-3-Clause
""":func:`scale_loss`, the context around a backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .._internal import skipped_steps
from ._amp_state import _amp_state, find_stash
from .casting import disable_casts
from .optimizer import OptimizerStash
from .scaler import LossScaler


def _listed(optimizers: Any) -> Any:
    return optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]


def _stashes(optimizers: Any) -> list[OptimizerStash]:
    stashes = []
    for optimizer in _listed(optimizers):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "amp.scale_loss takes an optimizer or a list of optimizers, not "
                f"{type(optimizer).__name__}."
            )
        stash = find_stash(optimizer)
        if stash is None:
            raise RuntimeError(
                f"amp.scale_loss was given a {type(optimizer).__name__} that amp does not know, "
                "such as a copy: pass every optimizer to amp.initialize, with its model."
            )
        if stash.in_context:
            raise RuntimeError(
                "amp.scale_loss was entered inside another amp.scale_loss of the same optimizer, "
                "so their gradients would be mixed: call backward() on the sum of the losses in "
                "one context, or exit the first context before entering the second."
            )
        if stash not in stashes:  # a LARC and its inner optimizer share one
            stashes.append(stash)
    return stashes


def _scaler(stashes: list[OptimizerStash], loss_id: int) -> LossScaler:
    scalers = stashes[0].scalers if stashes else _amp_state.loss_scalers
    try:
        return scalers[loss_id]
    except IndexError:
        raise RuntimeError(
            f"amp.scale_loss was called with loss_id={loss_id}, but amp.initialize was called with "
            f"num_losses={len(scalers)}; pass a larger num_losses."
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
    optimizers' parameters (or of their master weights) are unscaled and the scale is adapted. After
    an overflow, the next ``step()`` of each optimizer does nothing. The overflow flag is first
    combined over the ranks, so either all ranks skip or none. With a dynamic scale, every rank of
    the group must therefore exit the same number of these contexts. Casts of O1 are off inside.

    Args:
        loss: a floating-point scalar.
        optimizers: the optimizer, or list of optimizers, whose parameters get gradients from this
            loss. :class:`~apex.parallel.LARC.LARC` is accepted. With an empty list the loss is
            scaled, and nothing else is done.
        loss_id: which of ``num_losses`` scalers to use.
        model: ignored; kept for old scripts.
        delay_unscale: leave the gradients scaled, for a later context without it. Until then,
            ``step()`` raises RuntimeError.
        delay_overflow_check: neither adapt the scale nor skip, for scripts that decide themselves.

    Raises:
        RuntimeError: before ``initialize``, for an unknown `loss_id` or optimizer, inside another
            context of the same optimizer, or if the scales of the ranks differ.
        TypeError: `loss` or `optimizers` has another type.

    If the scale is dynamic, waits for the device once.
    """
    del model
    if not hasattr(_amp_state, "opt_properties"):
        raise RuntimeError(
            "amp.scale_loss was called before amp.initialize; call amp.initialize first."
        )
    if not _amp_state.opt_properties.enabled and not any(map(find_stash, _listed(optimizers))):
        yield loss
        return
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"amp.scale_loss takes a loss tensor with a grad_fn, not a {type(loss).__name__}."
        )
    stashes = _stashes(optimizers)
    scaler = _scaler(stashes, loss_id)
    if scaler.has_no_effect and not any(
        stash.master_weights or stash.params_have_scaled_gradients for stash in stashes
    ):
        with disable_casts():
            yield loss.float()
        return
    scale = scaler.loss_scale()
    for stash in stashes:
        stash.prepare(scale)
        stash.in_context = True
    skipped = skipped_steps.count()
    failure: Exception | None = None
    delayed = False
    try:
        with disable_casts():
            yield scaler.scale(loss)
        delayed = delay_unscale
    except Exception as error:
        if skipped_steps.count() <= skipped:
            raise
        # All ranks skip this step. The others did not fail, and will exchange their flags below.
        failure = error
    finally:
        scaler.clear_overflow_state()
        for stash in stashes:
            stash.in_context = False
            stash.mark(scale)
        for stash in stashes:
            if delayed:
                stash.params_have_scaled_gradients = True
            else:
                stash.unscale(scaler, scale)
    if stashes and not (delay_unscale or delay_overflow_check):
        scaler.synchronize()
        if scaler.update_scale():
            for stash in stashes:
                stash.skip_next_step(scaler, loss_id)
    if failure is not None:
        raise failure
