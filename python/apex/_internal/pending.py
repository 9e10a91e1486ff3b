# SPDX-License-Identifier: BSD-3-Clause
"""Gradients and updates that are still on their way, for code that needs them to be there."""

from __future__ import annotations

import weakref
from typing import Protocol


class Holder(Protocol):
    """What may have some."""

    def synchronize(self) -> None:
        """Returns when they are there."""


holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def complete() -> None:
    """Returns when all that are held in this process are there."""
    for holder in list(holders):
        holder.synchronize()
