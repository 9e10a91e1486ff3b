# SPDX-License-Identifier: BSD-3-Clause
"""The recommendations of ``apex.doctor``, by a table of facts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from doctor_support import GIB, a_case, a_container, a_rank, all_reduces, hosts, in_order, two

from apex._doctor import facts, here, network, pairs, report, rules, self_test
from apex._doctor.case import Case, ranks_text


def gloo_takes(name: str | None, address: str | None, why: str = "host name") -> Any:
    return network.GlooChoice(why, (network.GlooCard(name, address),))


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


#: Rule, a case, and the parts of its text in order; an empty list if the rule must not fire.
TABLE: list[tuple[str, Case, list[str]]] = [
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
    ("loopback_between_hosts", two(gloo=LOOPBACK), []),  # on one host
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
    # torch for CUDA on a host without a GPU, for example where a job is prepared.
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
    ("slow_link", dataclasses.replace(two(**load(4.1)), slow=[SLOW_RANK]), []),
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
    ),  # then too_many_ranks fires
    # A container with four cores and a CPU limit of 2.5.
    ("too_many_threads", a_case(a_rank(**threads(4, quota=2.5))), ["4 threads for 2 cores", "=2"]),
    # Both are bound to the same two cores.
    ("too_many_threads", two(**threads(2, affinity=(0, 1))), ["4 threads for 2 cores", "=1"]),
    # Containers of one machine, each with a CPU limit of 1.5 cores.
    (
        "too_many_threads",
        a_case(*(a_container(rank, **threads(2, quota=1.5)) for rank in range(2))),
        ["2 processes have 4 threads for 3 cores on host a"],
    ),
    (
        "too_many_threads",
        a_case(*(a_container(rank, **threads(2)) for rank in range(3))),
        ["3 processes have 6 threads for 4 cores"],
    ),
    # Each is bound to two different cores.
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
    # swapped-out memory of an idle program
    ("little_memory", a_case(a_rank(memory={"swap_used": GIB})), []),
    (
        "several_containers",
        a_case(a_container(0), a_container(1)),
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
    ("busy_host", a_case(a_rank(**load(4.5))), ["4.5 processes", "4 cores"]),
    ("busy_host", a_case(a_rank(**load(4.0))), []),
    ("busy_host", two(**load(6.0)), []),  # the busy processes are ranks of the job
    ("too_few_threads", two(**threads(1)), ["2 cores", "OMP_NUM_THREADS=2", "torchrun"]),
    ("too_few_threads", two(**threads(1), gpus=facts.Gpus(2, ("H100", "H100"))), []),
    ("too_few_threads", a_case(a_rank(**threads(1))), []),  # no job
    ("too_few_threads", a_case(*(a_container(rank, **threads(1)) for rank in range(4))), []),
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


@pytest.mark.parametrize(
    ("rule", "case", "parts"),
    [pytest.param(*row, id=f"{i}_{row[0]}") for i, row in enumerate(TABLE)],
)
def test_rule_case_of_the_table_says_what_to_do(rule: str, case: Case, parts: list[str]) -> None:
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
def test_rules_nothing_wrong_no_recommendation(case: Case) -> None:
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
    assert ranks_text(ranks) == text


def literals(source: str) -> list[str]:
    """The string literals of a C++ source in cpp/src/comm, adjacent ones joined."""
    text = (Path(__file__).resolve().parents[2] / "cpp" / "src" / "comm" / source).read_text()
    return re.findall(r'"([^"\n]*)"', re.sub(r'"\s*"', "", text))


def test_memory_not_shared_words_are_those_of_the_library() -> None:
    """The library gives its reason as the text of a warning."""
    begin, end = here.NOT_SHARED.pattern.split("(.*)")
    sentences = literals("host_topology.cpp")
    assert [text for text in sentences if re.search(begin, text)]
    assert [text for text in sentences if end in text]
    reasons = literals("host_memory.cpp")
    for part in rules.NOT_SHARED_REMEDIES.keys() - {"APEX_HOST_CHANNEL=0"}:
        assert [text for text in reasons if part in text], part
