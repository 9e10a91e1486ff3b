# SPDX-License-Identifier: BSD-3-Clause
"""Which ranks measure with which, and which pair is slow."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch.distributed as dist
from doctor_support import a_rank
from sync_batch_norm_support import fresh_seed

from apex._doctor import facts, job, measure, pairs


@pytest.mark.parametrize("count", range(2, 10))
def test_rounds_have_every_pair_once_and_no_rank_twice(count: int) -> None:
    ranks = [10 * rank for rank in range(count)]
    found = pairs.rounds(ranks)
    assert len(found) == count - 1 + count % 2
    assert sorted(itertools.chain(*found)) == list(itertools.combinations(ranks, 2))
    for one in found:
        members = list(itertools.chain(*one))
        assert len(members) == len(set(members))


def matrix(
    count: int, changed: dict[tuple[int, int], float], quantity: str = "bandwidth"
) -> list[pairs.Pair]:
    """1 GB/s and 100 us between any two of ``count`` ranks, slower by a factor where changed."""
    found = []
    for both in itertools.combinations(range(count), 2):
        factor = changed.get(both, 1.0)
        latency = 100e-6 * (factor if quantity == "latency" else 1)
        found.append(pairs.Pair(both, latency, 1e9 / (factor if quantity == "bandwidth" else 1)))
    return found


def of_rank(rank: int, count: int, factor: float) -> dict[tuple[int, int], float]:
    every = itertools.combinations(range(count), 2)
    return {both: factor for both in every if rank in both}


@pytest.mark.parametrize("quantity", ["bandwidth", "latency"])
@pytest.mark.parametrize(
    ("count", "changed", "named"),
    [
        (4, {}, []),  # all are equal
        (2, {}, []),  # one pair
        (3, {(0, 1): 10.0}, [(0, 1)]),
        (4, {(1, 3): 10.0}, [(1, 3)]),
        (4, {(1, 3): 1.9}, []),
        (6, {(1, 3): 10.0, (0, 5): 8.0}, [(0, 5), (1, 3)]),
        (3, of_rank(2, 3, 10.0), [(2,)]),  # two of three pairs, which the median would not detect
        (5, of_rank(0, 5, 10.0), [(0,)]),
        (6, of_rank(0, 6, 10.0) | {(2, 3): 10.0}, [(0,), (2, 3)]),
        # Two racks: most pairs use the slow link, which belongs to no single host.
        (4, {(0, 2): 9.0, (0, 3): 9.0, (1, 2): 9.0, (1, 3): 9.0}, []),
    ],
)
def test_slow_synthetic_matrix_names_the_pair_or_the_rank(
    count: int, changed: dict[tuple[int, int], float], named: list[Any], quantity: str
) -> None:
    found = pairs.slow(matrix(count, changed, quantity))
    assert [one.ranks for one in found] == named
    assert all(one.quantity == quantity for one in found)


def test_slow_in_one_host_needs_more_and_looks_at_bandwidth_only() -> None:
    assert pairs.slow(matrix(4, {(1, 3): 3.0}), one_host=True) == []
    assert pairs.slow(matrix(4, {(1, 3): 50.0}, "latency"), one_host=True) == []
    (found,) = pairs.slow(matrix(4, {(1, 3): 5.0}), one_host=True)
    assert found.ranks == (1, 3)


def test_slow_two_pairs_are_too_few() -> None:
    assert pairs.slow(matrix(3, {(0, 1): 50.0})[:2]) == []


def test_slow_in_bandwidth_and_latency_is_named_once() -> None:
    links = [
        dataclasses.replace(one, latency_s=one.latency_s * (50 if one.ranks == (1, 2) else 1))
        for one in matrix(4, {(1, 2): 10.0})
    ]
    (found,) = pairs.slow(links)
    assert (found.ranks, found.quantity) == ((1, 2), "bandwidth")
    assert (found.value, found.median) == (1e8, 1e9)


def test_slow_latency_of_a_fast_network_needs_a_noticeable_excess() -> None:
    """A busy core can turn a microsecond into ten."""
    links = [pairs.Pair(one.ranks, 1e-6, 1e9) for one in matrix(4, {})]
    links[0] = dataclasses.replace(links[0], latency_s=10e-6)
    assert pairs.slow(links) == []


def test_slow_noise_names_no_pair_and_hides_no_slow_one() -> None:
    seed = fresh_seed()
    noise = random.Random(seed)
    for count in range(3, 9):
        links = [
            pairs.Pair(one.ranks, 1e-4 * noise.uniform(0.6, 2), 1e9 * noise.uniform(0.7, 1.3))
            for one in matrix(count, {})
        ]
        assert pairs.slow(links) == [], f"seed {seed}"
        guilty = noise.choice(links).ranks
        links = [
            dataclasses.replace(
                one, bytes_per_s=one.bytes_per_s / (4 if one.ranks == guilty else 1)
            )
            for one in links
        ]
        assert [one.ranks for one in pairs.slow(links)] == [guilty], f"seed {seed}"


def test_better_takes_the_undisturbed_part_of_each_measurement() -> None:
    one, two = pairs.Pair((0, 1), 1e-4, 1e8), pairs.Pair((0, 1), 2e-4, 1e9)
    assert pairs.better(one, two) == pairs.better(two, one) == pairs.Pair((0, 1), 1e-4, 1e9)


def test_pair_that_is_slow_once_is_measured_again_and_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0's part, without the other ranks."""
    calls: list[pairs.Ranks] = []

    def pair(ranks: pairs.Ranks) -> pairs.Pair:
        calls.append(ranks)
        is_slow = ranks == (0, 3) or (ranks == (0, 1) and calls.count(ranks) == 1)
        return pairs.Pair(ranks, 1e-4, 1e7 if is_slow else 1e9)

    def gather(mine: Any) -> list[Any]:
        return [list(mine)]

    monkeypatch.setattr(job.measure, "pair", pair)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(job, "all_gather_object", gather)
    rounds = pairs.rounds(range(6))
    found = job._measure_pairs(job.Plan(rounds, [], one_host=False))
    assert [one.ranks for one in pairs.slow(found)] == [(0, 3)]
    again = [(0, 1), (0, 3)]
    assert sorted(calls) == sorted([*again, *((0, rank) for rank in range(1, 6))])


@pytest.mark.parametrize(("one_s", "count"), [(1e-9, 50), (0.07, 4), (20.0, 1)])
def test_repetitions_fit_the_budget_and_are_never_none(one_s: float, count: int) -> None:
    assert measure._repetitions(one_s, most=50) == count


def test_plan_one_rank_of_each_host_or_every_rank_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    alone = job.plan([a_rank(rank) for rank in range(3)])
    assert alone.rounds == [[(0, 1)], [(0, 2)], [(1, 2)]]  # one pair at a time
    several = job.plan([a_rank(rank, "abcd"[rank // 2]) for rank in range(8)])
    assert {both for one in several.rounds for both in one} == set(
        itertools.combinations((0, 2, 4, 6), 2)
    )
    assert len(several.rounds) == 3  # two pairs at a time
    assert alone.one_host and not several.one_host
    assert job.plan([a_rank(rank) for rank in range(job.MOST_LOCAL_RANKS + 1)]).rounds == []
    shared = [a_rank(rank, gpus=facts.Gpus(1, ("H100",), 0, "the same")) for rank in range(2)]
    owned = [a_rank(rank, gpus=facts.Gpus(2, ("H100",) * 2, rank, str(rank))) for rank in range(2)]
    assert job.plan(shared).backends == ["gloo", "apex"]
    assert job.plan(owned).backends == ["gloo", "apex", "nccl"]
    assert job.plan([owned[0], a_rank(1)]).backends == ["gloo", "apex"]
    many = job.plan([a_rank(rank, f"a{rank}") for rank in range(100)]).rounds
    assert len(many) == job.MOST_ROUNDS and {len(one) for one in many} == {50}
