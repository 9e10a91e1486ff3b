# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of a job compare what they are, and measure the links between them.

Facts travel through the store that the launcher names, before there is a Gloo group: they may
explain why there cannot be one.
"""

from __future__ import annotations

import datetime
import itertools
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from apex._doctor import measure, pairs
from apex._doctor.case import Case, ranks_text
from apex._doctor.facts import Facts
from apex._doctor.rules import PREVENTS_GLOO
from apex._doctor.self_test import SelfTest

#: On one host every pair of so many ranks is measured; among more, none.
MOST_LOCAL_RANKS = 8
#: Between hosts; with more than 64 hosts not every pair is measured, but every host is.
MOST_ROUNDS = 63
#: How long rank 0 waits for what other ranks do after a failure.
GRACE_S = 1.0
#: Pairs that are measured again before one of them is called slow.
MOST_AGAIN = 12

Rounds = list[list[pairs.Ranks]]


class Unreachable(Exception):
    """This rank cannot reach the others; the message is one sentence."""


@dataclass(frozen=True)
class Record:
    """What each rank reports first."""

    facts: Facts
    self_tests: Sequence[SelfTest]


@dataclass(frozen=True)
class Outcome:
    """Of the whole job.

    Attributes:
        problem: why not everything was measured, in one sentence; None: it was.
    """

    records: Sequence[Record]
    measured: Sequence[measure.AllReduce] = ()
    links: Sequence[pairs.Pair] = ()
    slow: Sequence[pairs.Slow] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Plan:
    """What rank 0 decides that all measure.

    Attributes:
        rounds: of pairs; those of one round at the same time.
        backends: for all-reduces.
        one_host: of all ranks.
    """

    rounds: Rounds
    backends: Sequence[str]
    one_host: bool


def is_job(environment: Mapping[str, str]) -> bool:
    return int(environment.get("WORLD_SIZE", "1")) > 1 and "RANK" in environment


def run(mine: Record, environment: Mapping[str, str], timeout_s: float) -> Outcome | None:
    """On rank 0 what it has learned, on others None.

    Collective over the ranks of the job; blocks for a few times ``timeout_s`` at most. A rank that
    fails reports that to rank 0 and returns: a launcher ends all ranks when one ends with an error.

    Raises:
        Unreachable: on a rank that does not reach the store of rank 0 or of the launcher, or gets
            no plan from rank 0.
    """
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    store = _connect(environment, rank, timeout_s)
    _put(store, f"record/{rank}", mine)
    if rank != 0:
        decided = _plan_of_rank_0(store, timeout_s)
        if decided is not None:
            _measure(decided, store, mine.facts, world, timeout_s)
        return None
    found = _collect(store, world, timeout_s)
    records = list(found.values())
    problem = _why_not(Case([record.facts for record in records]), world, timeout_s)
    decided = None if problem else plan([record.facts for record in records])
    _put(store, "plan", decided)
    if decided is None:
        # The store may end with this process.
        until = time.monotonic() + GRACE_S
        while store.add("read", 0) < len(found) - 1 and time.monotonic() < until:
            time.sleep(0.02)
        return Outcome(records, problem=problem)
    try:
        measured, links = _measure(decided, store, mine.facts, world, timeout_s)
    except RuntimeError:
        return Outcome(records, problem=_first_errors(store, world))
    return Outcome(records, measured, links, pairs.slow(links, decided.one_host))


def _measure(
    decided: Plan, store: dist.Store, mine: Facts, world: int, timeout_s: float
) -> tuple[list[measure.AllReduce], list[pairs.Pair]]:
    rank = mine.place.rank
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", store),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        measured = [measure.all_reduce(one, _device(one, mine)) for one in decided.backends]
        links = _measure_pairs(decided)
        dist.destroy_process_group()
    except RuntimeError as error:
        store.set(f"error/{rank}", _line(error))
        if rank == 0:
            raise
        return [], []
    return measured, links


def _why_not(case: Case, world: int, timeout_s: float) -> str | None:
    """Why a Gloo group cannot be made, in one sentence; None: it can."""
    absent = set(range(world)) - {facts.place.rank for facts in case.ranks}
    if absent:
        return f"{ranks_text(absent)} of {world} did not come within {timeout_s:g} s"
    if any(rule(case) for rule in PREVENTS_GLOO):
        return "Gloo cannot connect the ranks, so nothing was measured"
    return None


def plan(ranks: Sequence[Facts]) -> Plan:
    """For all ranks of a job."""
    first_of: dict[tuple[str, str], int] = {}
    for facts in ranks:
        first_of.setdefault(facts.place.key, facts.place.rank)
    if len(first_of) > 1:
        rounds = pairs.rounds(list(first_of.values()))[:MOST_ROUNDS]
    elif len(ranks) <= MOST_LOCAL_RANKS:
        # Pairs of one host share its cores and memory.
        rounds = [[both] for both in itertools.combinations(range(len(ranks)), 2)]
    else:
        rounds = []
    gpus = {facts.gpus.uuid for facts in ranks if facts.gpus.own is not None}
    with_nccl = len(gpus) == len(ranks) and dist.is_nccl_available()
    backends = ["gloo", "apex", *(["nccl"] if with_nccl else [])]
    return Plan(rounds, backends, one_host=len(first_of) == 1)


def _connect(environment: Mapping[str, str], rank: int, timeout_s: float) -> dist.Store:
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise Unreachable("RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT")
    # torchrun's agent keeps the store of its ranks.
    by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            address,
            int(port),
            is_master=rank == 0 and not by_agent,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=not by_agent,
        )
    except RuntimeError as error:
        raise Unreachable(
            f"the store at {address}:{port} was not reached within {timeout_s:g} s ({_line(error)})"
        ) from None
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"apex_doctor/{attempt}", store)


def _collect(store: dist.Store, world: int, timeout_s: float) -> dict[int, Record]:
    """By rank; without those that do not come in time."""
    found: dict[int, Record] = {}
    until = time.monotonic() + timeout_s
    for rank in range(world):
        # Ranks after one that is absent may have come.
        while not store.check([f"record/{rank}"]) and time.monotonic() < until:
            time.sleep(0.02)
        if store.check([f"record/{rank}"]):
            found[rank] = _get(store, f"record/{rank}")
    return found


def _plan_of_rank_0(store: dist.Store, timeout_s: float) -> Plan | None:
    """None: there is nothing to measure."""
    try:
        store.wait(["plan"], datetime.timedelta(seconds=2 * timeout_s))
        decided: Plan | None = _get(store, "plan")
        store.add("read", 1)
    except RuntimeError as error:
        raise Unreachable(f"no plan came from rank 0 ({_line(error)})") from None
    return decided


def _device(backend: str, mine: Facts) -> torch.device:
    if backend != "nccl" or mine.gpus.own is None:
        return torch.device("cpu")
    torch.cuda.set_device(mine.gpus.own)
    return torch.device("cuda", mine.gpus.own)


def _measure_pairs(decided: Plan) -> list[pairs.Pair]:
    """All of them, on every rank."""
    found: dict[pairs.Ranks, pairs.Pair] = {}
    _measure_rounds(decided.rounds, found)
    blamed = [set(one.ranks) for one in pairs.slow(list(found.values()), decided.one_host)]
    suspects = [ranks for ranks in found if any(one <= set(ranks) for one in blamed)]
    _measure_rounds([[ranks] for ranks in suspects[:MOST_AGAIN]], found)
    return [found[ranks] for ranks in sorted(found)]


def _measure_rounds(rounds: Rounds, found: dict[pairs.Ranks, pairs.Pair]) -> None:
    rank, mine = dist.get_rank(), []
    for one in rounds:
        dist.barrier()
        mine += [measure.pair(ranks) for ranks in one if rank in ranks]
    gathered: list[list[pairs.Pair]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    for pair in itertools.chain(*gathered):
        found[pair.ranks] = pairs.better(pair, found.get(pair.ranks, pair))


def _first_errors(store: dist.Store, world: int) -> str:
    """A failure on one rank soon is one on all: the others are given time to report theirs."""
    time.sleep(GRACE_S)
    texts = [
        f"rank {rank}: {store.get(f'error/{rank}').decode()}"
        for rank in range(world)
        if store.check([f"error/{rank}"])
    ]
    return f"Gloo, or a measurement, failed on {'; '.join(texts[:3])}"


def _put(store: dist.Store, key: str, value: object) -> None:
    store.set(key, pickle.dumps(value).hex())


def _get(store: dist.Store, key: str) -> Any:
    """From a rank of the same job."""
    return pickle.loads(bytes.fromhex(store.get(key).decode()))


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
