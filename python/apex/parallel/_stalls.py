# SPDX-License-Identifier: BSD-3-Clause
"""Reports which rank stalls the others."""

from __future__ import annotations

import logging

import torch.distributed as dist

from apex import _core

_logger = logging.getLogger("apex.parallel.watch")


def stall_report() -> str | None:
    """The last stall report that this process has printed, or None.

    A rank is stalled if it waits in a collective of this library for 10 seconds (at most a third of
    the group's timeout). The environment variable ``APEX_STALL_SECONDS`` sets another time; 0 turns
    reports off. One of the stalled ranks then prints a report to its standard error. It names the
    rank that stalls the others, what that rank is doing (its Python stack, and the gradient that
    its backward computes next), the likely cause, and the remedy. Over NCCL the GPU waits, not the
    host. A report then names a rank only if its host has not made the call yet. Otherwise nothing
    is printed. The logger ``apex.parallel.watch`` receives the same text. Does not block; thread
    safe.
    """
    return _core.stall_report() or None


def log_notice(text: str) -> None:
    """Log a text that the engine has written to standard error. Called on an engine thread."""
    # Without a handler, logging would write it to standard error again.
    if _logger.hasHandlers():
        rank = dist.get_rank() if dist.is_initialized() else None
        _logger.warning("%s", text, extra={"rank": rank})
