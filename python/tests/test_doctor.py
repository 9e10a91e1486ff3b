# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex.doctor``: its rules by tables, its measurements in real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import free_port
from sync_batch_norm_support import fresh_seed
from torch import Tensor
from warm import run_script_on_ranks

from apex import doctor
from apex._doctor import facts, here, job, measure, network, pairs, report, rules, self_test
from apex.parallel import SyncBatchNorm

GIB = 1 << 30


# --- rules: facts of ranks that have nothing to change, and what is changed in them ---


def a_rank(rank: int = 0, host: str = "a", **changes: Any) -> facts.Facts:
    """One rank of a host with four cores.

    ``changes`` are new parts, or values of a part, as in ``limits={"open_files": 9}``.

    Hosts have their own boot and namespaces, and the address 10.0.0.<letter of the host>.
    """
    address = f"10.0.0.{ord(host[0])}"
    one = facts.Facts(
        place=facts.Place(rank, host, f"boot of {host}", "pid:[1]", f"net of {host}"),
        build=facts.Build(
            *("0.1.0", "2.13.0", "3.11.7", "2.13.0", "GNU 12.2.0", True),
            *(None, False, "this libtorch is a CPU build", False, "the CUDA parts are off"),
        ),
        gpus=facts.Gpus(0, ()),
        processors=facts.Processors(4, (0, 1, 2, 3), None, 2, "AVX2", None, 0.5),
        memory=facts.Memory(16 * GIB, 12 * GIB, None, 0, 8 * GIB),
        limits=facts.Limits(1024, 4096, None),
        cards=(network.Card("lo", ("127.0.0.1",)), network.Card("eth0", (address,), True, 1000)),
        gloo=network.GlooChoice("host name", (network.GlooCard("eth0", address),)),
        variables={"OMP_NUM_THREADS": "2"},
        is_torchrun=True,
    )
    for part, change in changes.items():
        value = getattr(one, part)
        if dataclasses.is_dataclass(value) and isinstance(change, dict):
            change = dataclasses.replace(value, **change)
        one = dataclasses.replace(one, **{part: change})
    return one


def a_case(*ranks: facts.Facts, **measured: Any) -> rules.Case:
    return rules.Case(ranks or (a_rank(),), **measured)


def gloo_takes(name: str | None, address: str | None, why: str = "host name") -> Any:
    return network.GlooChoice(why, (network.GlooCard(name, address),))


def all_reduces(apex_s: float, gloo_s: float, shares: bool = True) -> list[measure.AllReduce]:
    return [
        measure.AllReduce("gloo", gloo_s, 1e9),
        measure.AllReduce("apex", apex_s, 2e9, shares),
    ]


CUDA = {"torch_cuda": "12.8", "with_cuda": True, "cuda_reason": "nvcc 12.8"}
NO_CARD = gloo_takes("eth9", None, "GLOO_SOCKET_IFNAME")
LOOPBACK = gloo_takes("lo", "127.0.0.1")
BRIDGE = gloo_takes("docker0", "172.17.0.1")
WRONG = self_test.SelfTest("cuda:0", "float16", 0.3, 2e-3)
RIGHT = self_test.SelfTest("cuda:0", "float16", 1e-3, 2e-3)
SLOW_PAIR = pairs.Slow((0, 1), "bandwidth", 0.1e9, 1.1e9)
SLOW_RANK = pairs.Slow((1,), "latency", 900e-6, 50e-6)
FAST_CARD = network.Card("ib0", ("10.1.0.1",), True, 100000)
ETH0 = network.Card("eth0", ("10.0.0.97",), True, 1000)


def load(value: float) -> dict[str, dict[str, float]]:
    return {"processors": {"load": value}}


def threads(count: int, **more: Any) -> dict[str, dict[str, Any]]:
    return {"processors": {"threads": count, **more}}


def two(**changes: Any) -> rules.Case:
    """Two ranks of one host with these changes."""
    return a_case(a_rank(0, **changes), a_rank(1, **changes))


def hosts(**changes: Any) -> rules.Case:
    """Two hosts of one rank; the changes are those of rank 1."""
    return a_case(a_rank(0), a_rank(1, "b", **changes))


#: Rule, a case, and what it says of it: parts in their order; none: it does not fire.
TABLE: list[tuple[str, rules.Case, list[str]]] = [
    ("failed_self_test", a_case(self_tests=[RIGHT]), []),
    ("failed_self_test", a_case(self_tests=[RIGHT, WRONG]), ["float16 on cuda:0", "=aten"]),
    (
        "failed_self_test",
        a_case(self_tests=[dataclasses.replace(WRONG, device="cpu", error=None)]),
        ["float16 on cpu", "ATEN_CPU_CAPABILITY=default"],
    ),
    (
        "failed_self_test",
        dataclasses.replace(two(), self_tests=[dataclasses.replace(WRONG, rank=1)]),
        ["(rank 1)"],
    ),
    ("no_such_card", a_case(a_rank(gloo=NO_CARD)), ["names eth9,", "(eth0 10.0.0.97)"]),
    ("no_such_card", hosts(gloo=NO_CARD), ["names eth9 on rank 1,", "(eth0 10.0.0.98)"]),
    (
        "loopback_between_hosts",
        hosts(gloo=LOOPBACK),
        ["127.0.0.1 on rank 1, to which the host name b resolves", "GLOO_SOCKET_IFNAME", "eth0"],
    ),
    (
        "loopback_between_hosts",
        hosts(gloo=gloo_takes("lo", "127.0.0.1", "no address")),
        ["because the host name b has no address"],
    ),
    ("loopback_between_hosts", two(gloo=LOOPBACK), []),  # of one host
    # Containers that share the network of their machine.
    (
        "loopback_between_hosts",
        a_case(a_rank(0, gloo=LOOPBACK), a_rank(1, gloo=LOOPBACK, place={"processes": "pid:[2]"})),
        [],
    ),
    (
        "same_address_on_two_hosts",
        a_case(a_rank(0, gloo=BRIDGE), a_rank(1, "b", gloo=BRIDGE)),
        ["172.17.0.1", "ranks 0 and 1"],
    ),
    ("same_address_on_two_hosts", two(gloo=BRIDGE), []),
    ("different_versions", hosts(), []),
    (
        "different_versions",
        a_case(*(a_rank(r, build={"torch": "2.13.1" if r == 2 else "2.13.0"}) for r in range(4))),
        ["torch (2.13.1 on rank 2, 2.13.0 on ranks 0, 1 and 3)"],
    ),
    (
        "different_variables",
        a_case(a_rank(0), a_rank(1), a_rank(2, variables={"NCCL_ALGO": "x" * 80})),
        ["OMP_NUM_THREADS (not set on rank 2, 2 on ranks 0 and 1)", "x" * 37 + "... on rank 2"],
    ),
    ("unused_gpus", a_case(a_rank(gpus={"device_files": 8})), ["CPU build", "torch for CUDA"]),
    (
        "unused_gpus",
        a_case(a_rank(gpus={"device_files": 8}, build=CUDA)),
        ["sees no GPU", "8", "CUDA_VISIBLE_DEVICES"],
    ),
    (
        "unused_gpus",
        a_case(a_rank(gpus={"names": ("H100",)}, build=CUDA | {"with_cuda": False})),
        ["no CUDA parts (nvcc 12.8)", "nvcc of CUDA 12.8"],
    ),
    ("unused_gpus", a_case(a_rank(gpus=facts.Gpus(1, ("H100",)), build=CUDA)), []),
    # torch for CUDA on a host without a GPU, as where a job is prepared.
    ("unused_gpus", a_case(a_rank(build=CUDA | {"with_cuda": False})), []),
    (
        "slow_link",
        dataclasses.replace(hosts(), slow=[SLOW_PAIR]),
        ["rank 0 (host a) and rank 1 (host b) the bandwidth is 0.1 GB/s", "1.1", "cables"],
    ),
    (
        "slow_link",
        dataclasses.replace(two(), slow=[SLOW_RANK]),
        ["rank 1 and all others the latency is 900 us", "50", "cores"],
    ),
    ("too_few_files", a_case(a_rank(limits={"open_files": 200})), ["200", "ulimit -n 260 before"]),
    (
        "too_few_files",
        a_case(*(a_rank(r, limits=facts.Limits(300, 300, None)) for r in range(16))),
        ["300 files on all ranks", "ulimit -n 320", "limit is 300", "root"],
    ),
    ("too_few_files", a_case(a_rank(limits={"open_files": None})), []),
    (
        "memory_not_shared",
        a_case(not_shared="cannot share memory (no shared memory (memfd_create): denied)"),
        ["denied", "seccomp"],
    ),
    ("memory_not_shared", a_case(not_shared="APEX_HOST_CHANNEL=0"), ["unset the"]),
    ("memory_not_shared", a_case(not_shared="memory of rank 1: /proc/7/fd/3"), ["one user"]),
    ("memory_not_shared", a_case(not_shared="at most 9 bytes (ulimit -f)"), ["unlimited"]),
    ("too_many_threads", two(**threads(2)), []),
    ("too_many_threads", two(**threads(3)), ["2 processes have 6", "4 cores", "THREADS=2"]),
    (
        "too_many_threads",
        a_case(*(a_rank(r, **threads(1)) for r in range(5))),
        [],
    ),  # too many ranks
    # A container with two cores of the time of four.
    ("too_many_threads", a_case(a_rank(**threads(4, quota=2.5))), ["4 threads for 2 cores", "=2"]),
    # Both are bound to the same two cores.
    ("too_many_threads", two(**threads(2, affinity=(0, 1))), ["4 threads for 2 cores", "=1"]),
    # Each is bound to two of its own.
    (
        "too_many_threads",
        a_case(a_rank(0, **threads(2, affinity=(0, 1))), a_rank(1, **threads(2, affinity=(2, 3)))),
        [],
    ),
    (
        "too_many_threads",
        hosts(**threads(9)),
        ["9 threads for 4 cores on host b", "THREADS=4"],
    ),
    (
        "too_many_ranks",
        a_case(*(a_rank(r, **threads(1)) for r in range(5))),
        ["5 ranks share 4 cores"],
    ),
    ("too_many_ranks", a_case(*(a_rank(r, **threads(1)) for r in range(4))), []),
    ("little_memory", a_case(a_rank(memory={"available": GIB // 4})), ["0.2 GiB of 16.0"]),
    (
        "little_memory",
        a_case(a_rank(memory={"limit": 2 * GIB, "available": GIB // 4})),
        ["of 2.0 GiB", "limit of the container"],
    ),
    (
        "little_memory",
        a_case(a_rank(memory={"swap_used": GIB, "available": 3 * GIB})),
        ["1.0 GiB are swapped out"],
    ),
    ("little_memory", a_case(a_rank(memory={"swap_used": GIB})), []),  # of something that sleeps
    (
        "several_containers",
        a_case(a_rank(0), a_rank(1, place={"processes": "pid:[2]"})),
        ["ranks 0 and 1", "one container"],
    ),
    ("several_containers", hosts(), []),
    (
        "faster_card",
        a_case(a_rank(0, cards=(ETH0, FAST_CARD)), a_rank(1, "b")),
        ["eth0, of 1 Gbit/s on host a", "ib0", "100 Gbit/s", "GLOO_SOCKET_IFNAME=ib0"],
    ),
    ("faster_card", two(cards=(ETH0, FAST_CARD)), []),
    (
        "faster_card",
        hosts(cards=(ETH0, dataclasses.replace(FAST_CARD, is_up=False))),
        [],
    ),
    ("busy_host", a_case(a_rank(**load(6.0))), ["6.0 processes", "4 cores"]),
    ("busy_host", a_case(a_rank(**load(5.0))), []),
    ("busy_host", two(**load(6.0)), []),  # they are ranks of the job
    ("too_few_threads", two(**threads(1)), ["2 cores", "OMP_NUM_THREADS=2", "torchrun"]),
    ("too_few_threads", two(**threads(1), gpus=facts.Gpus(2, ("H100", "H100"))), []),
    ("too_few_threads", a_case(a_rank(**threads(1))), []),  # no job
    ("low_frequency", a_case(a_rank(processors={"governor": "powersave"})), ["cpupower"]),
    ("low_frequency", a_case(a_rank(processors={"governor": "schedutil"})), []),
    ("slower_than_gloo", a_case(measured=all_reduces(5e-6, 200e-6)), []),
    ("slower_than_gloo", a_case(measured=all_reduces(300e-6, 200e-6)), ["APEX_HOST_CHANNEL=0"]),
    ("slower_than_gloo", a_case(measured=all_reduces(300e-6, 200e-6, shares=False)), []),
    (
        "slower_than_gloo",
        a_case(a_rank(**load(9.0)), measured=all_reduces(300e-6, 200e-6)),
        [],
    ),
    ("small_shm", a_case(a_rank(memory={"shm": 64 << 20})), ["64 MiB", "--shm-size"]),
    ("small_shm", a_case(a_rank(memory={"shm": None})), []),
]


def in_order(parts: list[str], text: str) -> bool:
    return re.search(".*".join(map(re.escape, parts)), text) is not None


@pytest.mark.parametrize(
    ("rule", "case", "parts"),
    [pytest.param(*row, id=f"{i}_{row[0]}") for i, row in enumerate(TABLE)],
)
def test_rule_case_of_the_table_says_what_to_do(
    rule: str, case: rules.Case, parts: list[str]
) -> None:
    given = getattr(rules, rule)(case)
    if not parts:
        assert given is None
        return
    assert given.rule == rule
    assert in_order(parts, str(given)), given
    assert given in rules.recommend(case, most=99)


def test_rules_all_are_in_the_table_and_fire() -> None:
    assert {rule.__name__ for rule in rules.RULES} == {row[0] for row in TABLE if row[2]}
    assert len({rule.__name__ for rule in rules.RULES}) == len(rules.RULES)


@pytest.mark.parametrize("case", [a_case(), two(), hosts()], ids=["alone", "two", "hosts"])
def test_rules_nothing_wrong_no_recommendation(case: rules.Case) -> None:
    assert rules.recommend(case) == []
    assert report.as_text(report.make(case, (), ())).endswith("\n\nnothing to change")


def test_recommend_many_gives_the_five_most_important_in_order() -> None:
    bad = a_rank(
        memory=facts.Memory(GIB, 0, None, GIB, 1),
        limits={"open_files": 9},
        gloo=NO_CARD,
        processors={"governor": "powersave", "threads": 99, "load": 99.0},
        gpus={"device_files": 1},
    )
    case = a_case(bad, self_tests=[WRONG])
    given = [one.rule for one in rules.recommend(case)]
    wanted = ["failed_self_test", "no_such_card", "unused_gpus", "too_few_files"]
    assert given == [*wanted, "too_many_threads"]
    text = report.as_text(report.make(case, (), ()))
    assert re.findall(r"^(\d)\. ", text, re.M) == list("12345")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 2, 4], "ranks 0, 2 and 4"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([0, 1, 2, 3, 7, 9, 10], "ranks 0 to 3, 7, 9 and 10"),
    ],
)
def test_ranks_text_runs_are_short(ranks: list[int], text: str) -> None:
    assert rules.ranks_text(ranks) == text


# --- pairs ---


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
    """1 GB/s and 100 us between any two of ``count`` ranks, by a factor slower where changed."""
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
        (3, of_rank(2, 3, 10.0), [(2,)]),  # two of three pairs: more than the median sees
        (5, of_rank(0, 5, 10.0), [(0,)]),
        (6, of_rank(0, 6, 10.0) | {(2, 3): 10.0}, [(0,), (2, 3)]),
        # Two racks: most pairs go through the slow link, which belongs to no host alone.
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
    """Ten times a microsecond is what a busy core makes of it."""
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
    """Rank 0's part: the others are left out."""
    calls: list[pairs.Ranks] = []

    def pair(ranks: pairs.Ranks) -> pairs.Pair:
        calls.append(ranks)
        is_slow = ranks == (0, 3) or (ranks == (0, 1) and calls.count(ranks) == 1)
        return pairs.Pair(ranks, 1e-4, 1e7 if is_slow else 1e9)

    def gather(gathered: list[Any], mine: Any) -> None:
        gathered[0] = list(mine)

    monkeypatch.setattr(job.measure, "pair", pair)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_gather_object", gather)
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


# --- the network card that Gloo takes ---

CARDS = (
    network.Card("lo", ("127.0.0.1", "::1")),
    network.Card("eth0", ("192.0.2.1", "192.0.2.9", "fd00::1")),
    network.Card("ib0", ("fd00::2",)),
    network.Card("down", ()),
)


@pytest.mark.parametrize(
    ("variable", "usable", "why", "taken"),
    [
        ("", ["192.0.2.9"], "host name", [("eth0", "192.0.2.9")]),
        ("", ["127.0.1.1"], "host name", [("lo", "127.0.1.1")]),  # Debian's /etc/hosts
        ("", ["203.0.113.5"], "host name", [(None, "203.0.113.5")]),
        ("", [], "no address", [("lo", "127.0.0.1")]),
        ("eth0", ["127.0.0.1"], "GLOO_SOCKET_IFNAME", [("eth0", "192.0.2.1")]),
        ("ib0,eth0", [], "GLOO_SOCKET_IFNAME", [("ib0", "fd00::2"), ("eth0", "192.0.2.1")]),
        ("eth9,down", [], "GLOO_SOCKET_IFNAME", [("eth9", None), ("down", None)]),
    ],
)
def test_choose_gloo_card_as_torch_does(
    variable: str, usable: list[str], why: str, taken: list[tuple[str | None, str | None]]
) -> None:
    choice = network.choose(CARDS, variable, usable)
    assert choice.why == why
    assert [(card.name, card.address) for card in choice.cards] == taken


def listening_addresses() -> set[str]:
    """To which this process has bound sockets that wait for connections; IPv4."""
    own = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            own.add(os.readlink(link))
    addresses = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            number = bytes.fromhex(fields[1].partition(":")[0])
            addresses.add(".".join(str(part) for part in reversed(number)))
    return addresses


@pytest.mark.parametrize("variable", ["", "x", "lo", "other"])
def test_gloo_binds_to_the_address_that_is_named(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = network.read_cards()
    if variable == "other":
        found = [card.name for card in cards if card.addresses and not card.is_loopback]
        if not found:
            pytest.skip("the loopback device is the only card with an address here")
        variable = found[0]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", variable)
    (card,) = facts.gather(os.environ).gloo.cards
    assert card.address is not None
    if ":" in card.address:
        pytest.skip("Gloo takes an IPv6 address here")
    before = listening_addresses()
    timeout = datetime.timedelta(seconds=20)
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout)
    assert listening_addresses() - before == {card.address}
    del group


def test_usable_addresses_are_those_of_this_host() -> None:
    assert "127.0.0.1" in network.usable_addresses("localhost")
    assert network.usable_addresses("192.0.2.77") == ()  # of no host: reserved for documentation
    assert network.usable_addresses("no such host") == ()


# --- facts ---


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/job/step\n"}
V1 = {"proc/self/cgroup": "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n"}
V1_CPU = "sys/fs/cgroup/cpu,cpuacct/docker/x"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2, None),
        (V2 | {"sys/fs/cgroup/job/step/cpu.max": "max 100000\n"}, None),
        (V2 | {"sys/fs/cgroup/job/step/cpu.max": "150000 100000\n"}, 1.5),
        (
            V2
            | {
                "sys/fs/cgroup/job/step/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/job/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        # In a container its own group is mounted as the root.
        (V2 | {"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        (V1 | {f"{V1_CPU}/cpu.cfs_quota_us": "-1", f"{V1_CPU}/cpu.cfs_period_us": "100"}, None),
        (V1 | {f"{V1_CPU}/cpu.cfs_quota_us": "250", f"{V1_CPU}/cpu.cfs_period_us": "100"}, 2.5),
    ],
)
def test_cpu_quota_of_control_groups(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    assert facts.cpu_quota(write_tree(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        (V2, (None, None)),
        (V2 | {"sys/fs/cgroup/job/memory.max": "max\n"}, (None, None)),
        (
            V2
            | {
                "sys/fs/cgroup/job/memory.max": "1000\n",
                "sys/fs/cgroup/job/memory.current": "900\n",
                "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 300\n",
            },
            (1000, 400),
        ),
        (
            V1
            | {
                "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "500",
                "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "100",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
            },
            (500, 400),
        ),
    ],
)
def test_memory_limit_of_control_groups(
    tmp_path: Path, files: dict[str, str], limit: tuple[int | None, int | None]
) -> None:
    assert facts.memory_limit(write_tree(tmp_path, files)) == limit


def test_shared_variables_leave_out_what_belongs_to_a_host() -> None:
    kept = {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring", "APEX_HOST_CHANNEL": "0", "LD_PRELOAD": ""}
    others = {
        "RANK": "1",
        "PATH": "/bin",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "1",
        "GOMP_CPU_AFFINITY": "0-3",
        "TORCHELASTIC_ERROR_FILE": "/tmp/1",
    }
    assert facts.shared_variables(kept | others) == kept


def test_gather_facts_of_this_process() -> None:
    found = facts.gather({"RANK": "3"})
    assert found.place.rank == 3
    assert found.build.torch == torch.__version__
    assert set(found.processors.affinity) == os.sched_getaffinity(0)
    assert GIB // 4 < found.memory.available <= found.memory.total
    assert found.limits.open_files in (None, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    assert "127.0.0.1" in [address for card in found.cards for address in card.addresses]
    json.dumps(report.as_json(report.make(a_case(found), (), ())), allow_nan=False)


# --- batch norm against float64 ---


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
            ],
        ),
    ],
)
def test_self_test_passes_for_every_dtype(device: str) -> None:
    tests = self_test.batch_norm(torch.device(device), rank=2)
    assert {test.dtype for test in tests} == set(self_test.TOLERANCES)
    assert all(test.has_passed and test.rank == 2 for test in tests), tests
    # A bound that rounding comes nowhere near would pass anything.
    assert all(test.error is not None and test.error * 1e4 > test.tolerance for test in tests)


def broken(change: Callable[[Tensor], Tensor]) -> type[SyncBatchNorm]:
    class Broken(SyncBatchNorm):
        def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
            return change(super().forward(input, z))

    return Broken


def refuse(_: Tensor) -> Tensor:
    raise RuntimeError("no kernel image\nand more")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda y: y * 1.1, None),
        (lambda y: y * float("nan"), "a result is infinite or NaN"),
        (refuse, "no kernel image"),
    ],
    ids=["off", "nan", "raises"],
)
def test_self_test_of_wrong_kernels_fails(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor], problem: str | None
) -> None:
    monkeypatch.setattr(self_test, "SyncBatchNorm", broken(change))
    tests = self_test.batch_norm(torch.device("cpu"))
    assert not any(test.has_passed for test in tests)
    assert {test.problem for test in tests} == {problem}
    made = report.make(a_case(self_tests=tests), (), ())
    assert made.has_failed and made.recommendations[0].rule == "failed_self_test"
    assert "FAILED" in report.as_text(made)
    json.dumps(report.as_json(made), allow_nan=False)


# --- two processes here ---


def run_doctor(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    for name in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.processes
def test_doctor_on_one_host_measures_and_prints_json() -> None:
    done = run_doctor("-m", "apex.doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == [] and len(found["recommendations"]) <= rules.MOST
    measured = {one["backend"]: one for one in found["all_reduces"]}
    assert set(measured) == {"gloo", "apex"}
    for one in measured.values():
        assert 0 < one["latency_s"] < 1 and 1e6 < one["bytes_per_s"] < 1e12
    assert measured["apex"]["shares_memory"] is True and found["not_shared"] is None
    assert {test["dtype"] for test in found["self_tests"]} == set(self_test.TOLERANCES)
    assert found["ranks"][0]["build"]["torch"] == torch.__version__


@pytest.mark.processes
def test_two_processes_that_fail_keep_what_they_measured_and_say_why() -> None:
    """Their files may have a megabyte, which is too little for shared memory."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        outcome = here.run(["apex", "no_such_backend"], 60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.backend for one in outcome.measured] == ["apex"]
    assert outcome.measured[0].shares_memory is False
    assert outcome.problem is not None
    assert in_order(["did not measure no_such_backend: ", "no_such_backend"], outcome.problem)
    assert outcome.not_shared is not None
    case = a_case(measured=outcome.measured, not_shared=outcome.not_shared)
    assert in_order(["1048576 bytes", "ulimit -f unlimited"], str(rules.memory_not_shared(case)))


@pytest.mark.processes
def test_two_processes_that_take_too_long_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(here.subprocess, "Popen", popen)
    outcome = here.run(["gloo"], 0.05)
    assert outcome.measured == () and outcome.problem is not None
    assert "did not measure gloo: no end within 0.05 s" in outcome.problem
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("warning", "environment", "reason"),
    [
        ("rank 1 of 2 cannot share memory", {}, "rank 1 of 2 cannot share memory"),
        (None, {"APEX_HOST_CHANNEL": "0"}, "APEX_HOST_CHANNEL=0"),
        (None, {}, "a warning above says why"),
    ],
)
def test_not_shared_names_the_reason(
    warning: str | None, environment: dict[str, str], reason: str
) -> None:
    assert doctor._not_shared(all_reduces(1, 1, shares=True), warning, environment) is None
    assert doctor._not_shared([], warning, environment) is None
    assert doctor._not_shared(all_reduces(1, 1, shares=False), warning, environment) == reason


# --- a job ---

#: What ranks of `warm.py` run: `python -m apex.doctor`, with changes of their own before.
SCRIPT = """
import os, sys
rank = int(os.environ["RANK"])
{change}
from apex import doctor
sys.exit(doctor.main(sys.argv[1:]))
"""


def run_job(
    folder: Path, ranks: int, change: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(change=change))
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return run_script_on_ranks(
        ranks, script, *arguments, cwd=folder, env=environment, timeout_s=100
    )


@pytest.mark.processes
def test_job_by_torchrun_prints_once_with_every_pair() -> None:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = run_doctor(*run, "-m", "apex.doctor", PET_LOCAL_ADDR="localhost")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("apex.doctor on 3 ranks of 1 host; rank 0 is on ") == 1
    assert re.findall(r"^  (\d - \d) +\d+ us  +\d+\.\d\d GB/s", done.stdout, re.M) == [
        "0 - 1",
        "0 - 2",
        "1 - 2",
    ]
    assert re.search(r"^  apex +\d+\.\d us +\d+\.\d\d GB/s  in shared memory$", done.stdout, re.M)
    assert re.search(r"^  cpu +passed: float64 ", done.stdout, re.M)
    last = done.stdout.strip().splitlines()[-1]
    assert last == "nothing to change" or re.match(r"[1-5]\. ", last)


@pytest.mark.processes
def test_job_rank_with_another_variable_and_slow_pair_are_named(tmp_path: Path) -> None:
    """What is measured between ranks 1 and 2 is made slow; the oracle is that choice."""
    change = """
os.environ["APEX_STALL_SECONDS"] = "7" if rank == 2 else "5"
import dataclasses
from apex._doctor import measure
real = measure.pair
def pair(ranks):
    found = real(ranks)
    factor = 100 if ranks == (1, 2) else 1
    return dataclasses.replace(found, bytes_per_s=found.bytes_per_s / factor)
measure.pair = pair
"""
    done = run_job(tmp_path, 3, change, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    given = {one["rule"]: one["finding"] for one in found["recommendations"]}
    variables = "ranks differ in APEX_STALL_SECONDS (7 on rank 2, 5 on ranks 0 and 1)"
    assert given["different_variables"] == variables
    assert given["slow_link"].startswith("between rank 1 and rank 2 the bandwidth is ")
    assert [one["ranks"] for one in found["slow"]] == [[1, 2]]
    assert [one["place"]["rank"] for one in found["ranks"]] == [0, 1, 2]
    assert [one["ranks"] for one in found["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for rank in (1, 2):
        assert (tmp_path / f"rank_{rank}.log").read_text() == ""


@pytest.mark.processes
def test_job_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, "os.environ['WORLD_SIZE'] = '4'", "--timeout-s", "5")
    assert done.returncode == 1
    assert "failed: ranks 2 and 3 of 4 did not come within 5 s." in done.stdout, done.stdout
    assert (tmp_path / "rank_1.log").read_text() == ""


@pytest.mark.processes
def test_job_rank_without_a_network_card_is_named_at_once(tmp_path: Path) -> None:
    change = "os.environ['GLOO_SOCKET_IFNAME'] = 'no_card' if rank == 1 else 'lo'"
    done = run_job(tmp_path, 2, change, "--timeout-s", "20")
    assert done.returncode == 1
    assert "failed: Gloo cannot connect the ranks" in done.stdout
    assert "GLOO_SOCKET_IFNAME names no_card on rank 1" in done.stdout


@pytest.mark.processes
def test_job_failure_of_one_rank_is_told_with_its_rank(tmp_path: Path) -> None:
    change = """
from apex._doctor import measure
real = measure.pair
def pair(ranks):
    if rank == 1:
        raise RuntimeError("no buffer space")
    return real(ranks)
measure.pair = pair
"""
    done = run_job(tmp_path, 2, change, "--timeout-s", "20")
    assert done.returncode == 1
    assert in_order(["failed: ", "rank 1: no buffer space"], done.stdout), done.stdout


def test_job_without_a_master_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert doctor.main([]) == 1
    assert "rank 1: RANK and WORLD_SIZE are set, but not MASTER_ADDR" in capsys.readouterr().err
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert doctor.main(["--timeout-s", "1"]) == 1
    assert "was not reached within 1 s" in capsys.readouterr().err


def test_arguments_that_are_wrong_end_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--timeout-s", "0"])
    assert ended.value.code == 2
    assert "0 is not a positive number" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        doctor.main(["--help"])
    assert "--json" in capsys.readouterr().out


# --- text ---


def test_text_of_a_job_on_two_hosts_names_hosts_and_the_slow_pair() -> None:
    case = a_case(*(a_rank(rank, "abc"[rank // 2]) for rank in range(6)))
    links = [
        pairs.Pair((0, 2), 90e-6, 1.1e9),
        pairs.Pair((0, 4), 95e-6, 1.2e9),
        pairs.Pair((2, 4), 95e-6, 0.1e9),
    ]
    case = dataclasses.replace(case, slow=pairs.slow(links))
    text = report.as_text(report.make(case, links, ()))
    assert "apex.doctor on 6 ranks of 3 hosts; rank 0 is on a" in text
    assert re.search(r"^  b +2 and 3 +4 +4 +0 +10\.0\.0\.98$", text, re.M)
    assert re.search(r"^  2 \(b\) - 4 \(c\) +95 us +0\.10 GB/s  slow$", text, re.M)
    assert len(re.findall(r"slow$", text, re.M)) == 1
    assert "1. between rank 2 (host b) and rank 4 (host c) the bandwidth is 0.1 GB/s" in text


def test_text_of_many_ranks_on_one_host_says_that_pairs_are_left_out() -> None:
    for count, said in ((job.MOST_LOCAL_RANKS, False), (job.MOST_LOCAL_RANKS + 1, True)):
        case = a_case(*(a_rank(rank) for rank in range(count)))
        text = report.as_text(report.make(case, (), ()))
        assert ("not measured among more than 8 ranks of one host" in text) == said
        failed = report.as_text(report.make(case, (), ["a rank did not come"]))
        assert "not measured" not in failed and "failed: a rank did not come." in failed


def test_text_of_many_pairs_shows_the_slowest() -> None:
    count = 9
    links = [
        pairs.Pair(both, 1e-4, 1e9 + number)
        for number, both in enumerate(itertools.combinations(range(count), 2))
    ]
    case = a_case(*(a_rank(rank, f"a{rank}") for rank in range(count)))
    text = report.as_text(report.make(case, links[::-1], ()))
    assert text.count(" us ") == report.MOST_PAIRS
    assert "0 (a0) - 1 (a1)" in text and "7 (a7) - 8 (a8)" not in text
    assert "and 8 faster pairs; the median of all is 1.00 GB/s" in text
