# SPDX-License-Identifier: BSD-3-Clause
"""The schedule of pairwise measurements, and the detection of slow pairs. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

#: A pair is slow if its bandwidth is below the median divided by this factor (BANDWIDTH_FACTOR
#: between hosts, LOCAL_BANDWIDTH_FACTOR on one host).
BANDWIDTH_FACTOR = 2.0
LOCAL_BANDWIDTH_FACTOR = 4.0
#: Between hosts, a pair is also slow if its latency is above the median times this factor and
#: exceeds it by LATENCY_EXCESS_S. On one host the latency is that of the scheduler.
LATENCY_FACTOR = 4.0
LATENCY_EXCESS_S = 100e-6
#: With fewer pairs, the slow one cannot be identified.
FEWEST_PAIRS = 3

Ranks = tuple[int, int]


@dataclass(frozen=True)
class Pair:
    """A measurement between two ranks, the smaller rank first.

    Attributes:
        latency_s: of a message of a few bytes, one way; the 10th percentile.
        bytes_per_s: of a large message, one way.
    """

    ranks: Ranks
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Slow:
    """A slow pair, or a rank that is slow with all its peers.

    Attributes:
        ranks: two ranks for a pair, one for a slow rank.
        quantity: ``"bandwidth"`` (in bytes per second) or ``"latency"`` (in seconds).
        value: of the pair; for a rank, of its best pair.
        median: of the pairs with which the value is compared.
    """

    ranks: tuple[int, ...]
    quantity: str
    value: float
    median: float


def rounds(ranks: Sequence[int]) -> list[list[Ranks]]:
    """Every pair of ``ranks`` once, in rounds of disjoint pairs.

    This is the circle method for round-robin tournaments: one rank stays in place, and the others
    rotate by one position.
    """
    circle: list[int | None] = [*ranks]
    if len(circle) % 2:
        circle.append(None)  # a rank paired with None waits
    half = len(circle) // 2
    found = []
    for _ in range(len(circle) - 1):
        both = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in both if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def better(first: Pair, second: Pair) -> Pair:
    """The better values of two measurements of one pair. A disturbance only makes a pair slower."""
    return Pair(
        first.ranks,
        min(first.latency_s, second.latency_s),
        max(first.bytes_per_s, second.bytes_per_s),
    )


def slow(pairs: Sequence[Pair], one_host: bool = False) -> list[Slow]:
    """Ranks that are slow with all their peers, then slow pairs among the other ranks."""
    factor = LOCAL_BANDWIDTH_FACTOR if one_host else BANDWIDTH_FACTOR
    found = _slow(
        pairs,
        "bandwidth",
        lambda pair: pair.bytes_per_s,
        max,
        lambda value, median: value * factor < median,
    )
    if one_host:
        return found
    by_latency = _slow(
        pairs,
        "latency",
        lambda pair: pair.latency_s,
        min,
        lambda value, median: value > LATENCY_FACTOR * median + LATENCY_EXCESS_S,
    )
    # A slow link delays small messages also, so each link is reported once.
    named = [set(one.ranks) for one in found]
    return found + [
        one
        for one in by_latency
        if not any(ranks <= set(one.ranks) or ranks >= set(one.ranks) for ranks in named)
    ]


def _slow(
    pairs: Sequence[Pair],
    quantity: str,
    value_of: Callable[[Pair], float],
    best: Callable[[Iterable[float]], float],
    is_slow: Callable[[float, float], bool],
) -> list[Slow]:
    if len(pairs) < FEWEST_PAIRS:
        return []
    found = []
    for rank in sorted({rank for pair in pairs for rank in pair.ranks}):
        own = [value_of(pair) for pair in pairs if rank in pair.ranks]
        others = [value_of(pair) for pair in pairs if rank not in pair.ranks]
        # Not the median of all pairs: with three hosts, two of the three pairs include the slow
        # host.
        if len(own) > 1 and others and is_slow(best(own), statistics.median(others)):
            found.append(Slow((rank,), quantity, best(own), statistics.median(others)))
    slow_ranks = {rank for one in found for rank in one.ranks}
    rest = [pair for pair in pairs if not slow_ranks.intersection(pair.ranks)]
    if len(rest) >= FEWEST_PAIRS:
        median = statistics.median(map(value_of, rest))
        found += [
            Slow(pair.ranks, quantity, value_of(pair), median)
            for pair in rest
            if is_slow(value_of(pair), median)
        ]
    return found
