# SPDX-License-Identifier: BSD-3-Clause
"""Whether this process is under ``DistributedDataParallel.join()``, for code whose collectives need
every rank."""

from __future__ import annotations

#: The row of the table of what is not served.
WITH_AMP = "DistributedDataParallel.join() with master weights or a dynamic scale of amp"

_active = False


def active() -> bool:
    """Whether a join() is active."""
    return _active


def set_active(on: bool) -> None:
    """A join() begins or has ended."""
    global _active
    _active = on
