# SPDX-License-Identifier: BSD-3-Clause
"""The join() in force in this process, for those with collectives of their own.

Ranks that have run out of data follow the collectives that the others announce here.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist


class Announcer(Protocol):
    """What ``DistributedDataParallel.join()`` puts here."""

    def announce_forward(self, synchronizes_buffers: bool) -> int:
        """A forward of the wrapper begins; returns the rank whose buffers are taken."""

    def announce_batch_norm(self, module: Any) -> None:
        """A synchronized batch norm is about to run in training."""

    def announce_overflow_flags(self, scaler: Any, group: dist.ProcessGroup | None) -> None:
        """A loss scaler is about to combine its overflow flags over `group`."""


_current: Announcer | None = None


def current() -> Announcer | None:
    """The join() in force."""
    return _current


def set_current(announcer: Announcer | None) -> None:
    """Sets it; None when the join() has ended."""
    global _current
    _current = announcer
