# SPDX-License-Identifier: BSD-3-Clause
"""Offsets between the monotonic clocks of the processes of a group."""

from __future__ import annotations

import time

import torch.distributed as dist

from apex._internal.host import boot_of_host
from apex._internal.objects import all_gather_object

_ROUNDS = 16


def offset_to_first_rank(group: dist.ProcessGroup) -> float:
    """Seconds to add to ``time.perf_counter()`` here to get the clock of the group's first rank.

    0 if all ranks are on one host. Otherwise accurate to half the duration of a small collective.
    Collective.
    """
    # Processes on one running kernel share its monotonic clock.
    if len(set(all_gather_object(boot_of_host(), group))) == 1:
        return 0.0
    rounds = []
    for _ in range(_ROUNDS):
        entered = time.perf_counter()
        all_gather_object(None, group)
        rounds.append((entered, time.perf_counter()))
    of_ranks = all_gather_object(rounds, group)
    return clock_offset(of_ranks[0], of_ranks[dist.get_rank(group)])


def clock_offset(first: list[tuple[float, float]], mine: list[tuple[float, float]]) -> float:
    """Seconds to add to a time of this rank to get the first rank's time. Pure.

    Each argument lists, per round, when that rank entered a collective and when it left it. A rank
    leaves only after all have entered, which bounds the offset from both sides. The bounds of all
    rounds are intersected (K. Marzullo, Maintaining the Time in a Distributed System, 1984).
    """
    low = max(f_in - m_out for (f_in, _), (_, m_out) in zip(first, mine, strict=True))
    high = min(f_out - m_in for (_, f_out), (m_in, _) in zip(first, mine, strict=True))
    return (low + high) / 2
