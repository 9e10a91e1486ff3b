# SPDX-License-Identifier: BSD-3-Clause
"""Gradients and updates that are still in flight, for code that needs them completed."""

from __future__ import annotations

import weakref
from typing import Any, Protocol


class Holder(Protocol):
    """An object that may have pending gradients or updates."""

    def synchronize(self) -> None:
        """Block until they are complete."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the parameters."""


holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def complete() -> None:
    """Block until all pending gradients and updates of this process are complete."""
    for holder in list(holders):
        holder.synchronize()


def complete_for(optimizer: Any) -> None:
    """Complete what is pending for the parameters of `optimizer`, which will step them."""
    for holder in list(holders):
        if holder is optimizer:
            continue
        held = {id(p) for group in holder.param_groups for p in group["params"]}
        if any(id(p) in held for group in optimizer.param_groups for p in group["params"]):
            holder.synchronize()
