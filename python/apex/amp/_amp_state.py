# SPDX-License-Identifier: BSD-3-Clause
"""The state shared by the modules of :mod:`apex.amp`.

Scripts written for Apex read and write some of these attributes directly (``loss_scalers``,
``opt_properties``, ``allow_incoming_model_not_fp32``, ``handle``), so the state is one plain
object. Not thread safe: call :func:`apex.amp.initialize` from one thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .casting import AmpHandle, NoOpHandle
    from .frontend import Properties
    from .optimizer import OptimizerStash
    from .scaler import LossScaler


class AmpState:
    """The settings made by :func:`apex.amp.initialize` and :func:`apex.amp.init`.

    ``opt_properties`` does not exist before the first ``initialize``.
    """

    opt_properties: Properties

    def __init__(self) -> None:
        #: Turns the errors about unusual arguments of ``initialize`` into warnings.
        self.hard_override = False
        #: Lets ``initialize`` accept models that already hold float16 or bfloat16 parameters.
        self.allow_incoming_model_not_fp32 = False
        self.verbosity = 1
        self.handle: AmpHandle | NoOpHandle | None = None
        #: The scalers of the last ``initialize``. Each optimizer keeps its own.
        self.loss_scalers: list[LossScaler] = []
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float = 2.0**24


_amp_state = AmpState()


def _initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_rank_zero() -> bool:
    """Whether this process prints: rank 0, or the only process."""
    return not _initialized() or torch.distributed.get_rank() == 0


def several_ranks() -> bool:
    """Whether this process is one of several in a default process group."""
    return _initialized() and torch.distributed.get_world_size() > 1


def maybe_print(msg: str, rank0: bool = True) -> None:
    """Print `msg` when the verbosity is above 0 (on rank 0 only, unless `rank0` is False)."""
    if _amp_state.verbosity > 0 and (not rank0 or is_rank_zero()):
        print(msg)


def warn_or_err(msg: str) -> None:
    """Raise RuntimeError with `msg`, or only warn when ``hard_override`` is set."""
    if _amp_state.hard_override:
        warnings.warn(msg, stacklevel=3)
        return
    raise RuntimeError(
        f"{msg} If you are sure, set apex.amp._amp_state.hard_override = True to turn this "
        "error into a warning."
    )


def find_stash(optimizer: Any) -> OptimizerStash | None:
    """The stash of `optimizer`, or of an optimizer inside it (as in LARC), or None."""
    while optimizer is not None:
        stash: OptimizerStash | None = getattr(optimizer, "_amp_stash", None)
        if stash is not None:
            return stash
        optimizer = getattr(optimizer, "optim", None)
    return None


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield every parameter that `optimizer` updates: its float32 master weight, if it has one.

    Use it for clipping: ``clip_grad_norm_(amp.master_params(optimizer), max_norm)`` between the
    end of ``scale_loss`` and ``optimizer.step()``. Works for :class:`apex.parallel.LARC.LARC`.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
