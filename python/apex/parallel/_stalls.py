# SPDX-License-Identifier: BSD-3-Clause
"""Who holds everybody up."""

from __future__ import annotations

from apex import _core


def stall_report() -> str | None:
    """The last verdict about ranks that waited for long that this process has printed, or None.

    A rank that waits in a collective of this library for 10 seconds is in a stall (at most a third
    of the group's timeout; the environment variable ``APEX_STALL_SECONDS`` sets another time, and 0
    is never). One of the ranks that wait then prints to its standard error who holds them up, what
    that rank is doing (its Python stack, and the gradient that its backward has still to compute),
    why that may be, and what to do. Over CPU groups; with NCCL the host does not wait. Does not
    block; thread safe.
    """
    return _core.stall_report() or None
