# SPDX-License-Identifier: BSD-3-Clause
"""Who holds everybody up."""

from __future__ import annotations

import logging

import torch.distributed as dist

from apex import _core

_logger = logging.getLogger("apex.parallel.watch")


def stall_report() -> str | None:
    """The last verdict about ranks that waited for long that this process has printed, or None.

    A rank that waits in a collective of this library for 10 seconds is in a stall (at most a third
    of the group's timeout; the environment variable ``APEX_STALL_SECONDS`` sets another time, and 0
    is never). One of the ranks that wait then prints to its standard error who holds them up, what
    that rank is doing (its Python stack, and the gradient that its backward has still to compute),
    why that may be, and what to do. Over NCCL it is the GPU that waits: there a rank is named if
    its host has not made the call yet, and nothing is printed while all have. The logger
    ``apex.parallel.watch`` gets the same text. Does not block; thread safe.
    """
    return _core.stall_report() or None


def log_notice(text: str) -> None:
    """Called by the engine, on a thread of its own, with what it has written to standard error."""
    # Without a handler, logging would write it there once more.
    if _logger.hasHandlers():
        rank = dist.get_rank() if dist.is_initialized() else None
        _logger.warning("%s", text, extra={"rank": rank})
