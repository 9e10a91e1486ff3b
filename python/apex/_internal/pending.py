# SPDX-License-Identifier: BSD-3-Clause
"""Gradients and updates that are still in flight, for code that needs them completed."""

from __future__ import annotations

import weakref
from typing import Protocol


class Holder(Protocol):
    """An object that may have pending gradients or updates."""

    def synchronize(self) -> None:
        """Block until they are complete."""


holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def complete() -> None:
    """Block until all pending gradients and updates of this process are complete."""
    for holder in list(holders):
        holder.synchronize()
