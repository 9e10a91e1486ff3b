# SPDX-License-Identifier: BSD-3-Clause
"""How the monotonic clocks of the processes of a group differ."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from apex._internal.host import boot_of_host

_ROUNDS = 16


def all_gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Of all ranks of `group`. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def offset_to_first_rank(group: dist.ProcessGroup) -> float:
    """Seconds to add to ``time.perf_counter()`` here for that of the group's first rank.

    0 if all ranks are on one host; else right to half the time of a small collective. Collective.
    """
    # Processes under one boot of a kernel have the same monotonic clock.
    if len(set(all_gather(boot_of_host(), group))) == 1:
        return 0.0
    rounds = []
    for _ in range(_ROUNDS):
        entered = time.perf_counter()
        all_gather(None, group)
        rounds.append((entered, time.perf_counter()))
    of_ranks = all_gather(rounds, group)
    return clock_offset(of_ranks[0], of_ranks[dist.get_rank(group)])


def clock_offset(first: list[tuple[float, float]], mine: list[tuple[float, float]]) -> float:
    """Seconds to add to a time of this rank for that of the first one. Pure.

    Each argument has, by round, when that rank entered a collective and when it left it. A rank
    leaves after all have entered, which bounds the offset from both sides; bounds of all rounds are
    intersected (K. Marzullo, Maintaining the Time in a Distributed System, 1984).
    """
    low = max(f_in - m_out for (f_in, _), (_, m_out) in zip(first, mine, strict=True))
    high = min(f_out - m_in for (_, f_out), (m_in, _) in zip(first, mine, strict=True))
    return (low + high) / 2
