# SPDX-License-Identifier: BSD-3-Clause
"""The active join() of this process, for modules with their own collectives.

They announce their collectives here, so that ranks that have run out of data can follow them.
"""

from __future__ import annotations

from typing import Any, Protocol

#: The row of the table of what is not served.
WITH_AMP = "DistributedDataParallel.join() with master weights or a dynamic scale of amp"


class Announcer(Protocol):
    """The interface through which ``DistributedDataParallel.join()`` receives announcements."""

    def announce_forward(self, synchronizes_buffers: bool) -> int:
        """Announce a forward of the wrapper; returns the rank whose buffers are used."""

    def announce_batch_norm(self, module: Any) -> None:
        """Announce a synchronized batch norm that is about to run in training."""


_current: Announcer | None = None


def current() -> Announcer | None:
    """The active join(), or None."""
    return _current


def set_current(announcer: Announcer | None) -> None:
    """Set the active join(); None when it has ended."""
    global _current
    _current = announcer
