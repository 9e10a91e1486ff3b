# SPDX-License-Identifier: BSD-3-Clause
"""Compares the ranks of a job, and measures the links between them.

The facts are exchanged through the launcher's store, before a Gloo group exists, because they may
explain why no such group can be created.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from apex._doctor import measure, pairs
from apex._doctor.case import Case, ranks_text
from apex._doctor.facts import Facts
from apex._doctor.rules import PREVENTS_GLOO
from apex._doctor.self_test import SelfTest
from apex._internal.objects import all_gather_object

#: On one host, all pairs are measured up to this number of ranks, and no pair with more ranks.
MOST_LOCAL_RANKS = 8
#: Between hosts. Beyond 64 hosts not every pair is measured, but every host is.
MOST_ROUNDS = 63
#: How long rank 0 waits for other ranks after a failure.
GRACE_S = 1.0
#: How many suspect pairs are measured again before they are reported as slow.
MOST_AGAIN = 12
_MOST = 999_999_999
_FAILED = "Gloo, or a measurement, failed on"

Rounds = list[list[pairs.Ranks]]
T = TypeVar("T")


class JobError(Exception):
    """This rank cannot take part in the job. The message is one sentence."""


@dataclass(frozen=True)
class Record:
    """The first report of each rank."""

    facts: Facts
    self_tests: Sequence[SelfTest]


@dataclass(frozen=True)
class Outcome:
    """The result for the whole job.

    Attributes:
        problem: why some measurements are missing, in one sentence; None if none is.
    """

    records: Sequence[Record]
    measured: Sequence[measure.AllReduce] = ()
    links: Sequence[pairs.Pair] = ()
    slow: Sequence[pairs.Slow] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Plan:
    """The measurements that rank 0 chooses for all ranks.

    Attributes:
        rounds: lists of pairs. The pairs of one round are measured at the same time.
        backends: the backends whose all-reduces are measured.
        one_host: whether all ranks are on one host.
    """

    rounds: Rounds
    backends: Sequence[str]
    one_host: bool


def is_job(environment: Mapping[str, str]) -> bool:
    """Whether WORLD_SIZE and RANK describe one rank of several.

    Raises:
        JobError: if these variables or LOCAL_RANK have invalid values.
    """
    world = _number(environment, "WORLD_SIZE", 1, _MOST)
    if "WORLD_SIZE" not in environment:
        _number(environment, "RANK", 0, _MOST)
    else:
        _number(environment, "RANK", 0, world - 1, f" with WORLD_SIZE={world}")
    _number(environment, "LOCAL_RANK", 0, _MOST)
    if world > 1 and "RANK" not in environment:
        raise JobError(
            f"WORLD_SIZE is {world}, but RANK is not set: set both, as torchrun does, or unset "
            "WORLD_SIZE to examine this host alone"
        )
    return world > 1


def _number(
    environment: Mapping[str, str], name: str, least: int, most: int, given: str = ""
) -> int:
    text = environment.get(name, str(least))
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise JobError(
            f"{name} is {text!r}, but must be a number from {least} to {most}{given}: set it as "
            "torchrun does, or unset it"
        )
    return int(text)


def run(mine: Record, environment: Mapping[str, str], timeout_s: float) -> Outcome | None:
    """Examine the job. Returns the outcome on rank 0, None on other ranks.

    Collective over the ranks of the job. A step without an answer ends after at most three times
    ``timeout_s``. A rank that fails to measure reports this to rank 0 and returns normally, because
    launchers end all ranks when one ends with an error.

    Raises:
        JobError: if MASTER_ADDR or MASTER_PORT is wrong, or if the store of rank 0 or of the
            launcher does not answer. On ranks other than 0 also if rank 0 sends no plan, if two
            processes have the same rank, or if WORLD_SIZE differs.
    """
    rank, world = mine.facts.place.rank, int(environment["WORLD_SIZE"])
    store = _connect(environment, rank, timeout_s)
    try:
        records, decided, problem = _within(
            3 * timeout_s, partial(_agree, store, mine, world, timeout_s)
        )
    except RuntimeError as error:
        raise JobError(f"rank 0 sent no plan of measurements ({_line(error)})") from None
    measured: list[measure.AllReduce] = []
    links: list[pairs.Pair] = []
    if decided is not None and problem is None:
        measured, links, problem = _measure(decided, store, mine.facts, world, timeout_s)
    if records:
        one_host = decided is not None and decided.one_host
        return Outcome(records, measured, links, pairs.slow(links, one_host), problem)
    if problem is not None:
        time.sleep(GRACE_S)  # rank 0 must print before the launcher ends it
        raise JobError(problem)
    return None


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """The result of ``call``. Raises RuntimeError if it takes longer; the call continues to run.

    Requests to torch's store have no timeout if its server is stopped or is not a store at all.
    """
    result: futures.Future[T] = futures.Future()

    def work() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return result.result(limit_s)
    except futures.TimeoutError:
        raise RuntimeError("no answer") from None


def _agree(
    store: dist.Store, mine: Record, world: int, timeout_s: float
) -> tuple[Sequence[Record], Plan | None, str | None]:
    """Exchange records and a plan.

    Returns the records (on rank 0), the plan or None, and a reason if there is no plan or if there
    is a conflict.
    """
    leads, conflict = _join(store, mine.facts, world)
    _put(store, f"record/{mine.facts.place.rank}", mine)
    if not leads:
        store.wait(["plan"], datetime.timedelta(seconds=2 * timeout_s))
        decided = _get(store, "plan")
        # The other ranks have a plan and will measure, so this rank must too, unless it is
        # a duplicate.
        if decided is None:
            conflict = _conflict(store)
        store.add("joined", -1)  # from here on, the store may end with rank 0
        return [], decided, conflict
    records = _collect(store, world, timeout_s)
    case = Case([record.facts for record in records])
    problem = _conflict(store) or _why_not(case, world, timeout_s)
    decided = None if problem else plan(case.ranks)
    _put(store, "plan", decided)
    # Other ranks may still use the store, which may end with this process.
    until = time.monotonic() + timeout_s
    while decided is None and store.add("joined", 0) > 0 and time.monotonic() < until:
        time.sleep(0.02)
    return records, decided, problem


def _join(store: dist.Store, mine: Facts, world: int) -> tuple[bool, str | None]:
    """Whether this process is the one that makes the plan, and a conflict that it has reported."""
    rank, conflict = mine.place.rank, None
    size = store.compare_set("world", "", f"{world} on rank {rank}").decode()
    is_first = store.add(f"processes/{rank}", 1) == 1
    leads = is_first and rank == 0
    if not leads:
        store.add("joined", 1)
    if not is_first:
        conflict = (
            f"two processes have RANK={rank}, one of them process {os.getpid()} on host "
            f"{mine.place.host}: give every process its own RANK"
        )
    elif int(size.split()[0]) != world:
        conflict = (
            f"WORLD_SIZE is {world} on rank {rank} and {size}: give all processes the same value"
        )
    if conflict is not None:
        store.set("conflict", conflict)
    return leads, conflict


def _conflict(store: dist.Store) -> str | None:
    return store.get("conflict").decode() if store.check(["conflict"]) else None


def _measure(
    decided: Plan, store: dist.Store, mine: Facts, world: int, timeout_s: float
) -> tuple[list[measure.AllReduce], list[pairs.Pair], str | None]:
    """The measurements, and why they failed (on rank 0), or a conflict."""
    rank = mine.place.rank
    try:
        _within(
            2 * timeout_s,
            lambda: dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("gloo", store),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout_s),
            ),
        )
        measured = [
            _within(2 * timeout_s, partial(_all_reduce, one, mine, timeout_s))
            for one in decided.backends
        ]
        links = _measure_pairs(decided)
        problem = _within(timeout_s, partial(_conflict, store))
        dist.barrier()  # the store may end with rank 0
        dist.destroy_process_group()
        return measured, links, problem
    except RuntimeError as error:
        text = _line(error)
    try:
        problem = _within(GRACE_S + timeout_s, partial(_failure, store, rank, world, text))
    except RuntimeError:
        problem = f"{_FAILED} rank {rank}: {text}"
    return [], [], problem


def _why_not(case: Case, world: int, timeout_s: float) -> str | None:
    """Why a Gloo group cannot be created, in one sentence; None if it can."""
    absent = set(range(world)) - {facts.place.rank for facts in case.ranks}
    if absent:
        return f"{ranks_text(absent)} of {world} did not join within {timeout_s:g} s"
    if any(rule(case) for rule in PREVENTS_GLOO):
        return "Gloo cannot connect the ranks, so nothing was measured"
    return None


def plan(ranks: Sequence[Facts]) -> Plan:
    """The measurement plan for all ranks of a job."""
    first_of: dict[tuple[str, str], int] = {}
    for facts in ranks:
        first_of.setdefault(facts.place.key, facts.place.rank)
    if len(first_of) > 1:
        rounds = pairs.rounds(list(first_of.values()))[:MOST_ROUNDS]
    elif len(ranks) <= MOST_LOCAL_RANKS:
        # Pairs of one host share its cores and memory, so each round has one pair.
        rounds = [[both] for both in itertools.combinations(range(len(ranks)), 2)]
    else:
        rounds = []
    gpus = {facts.gpus.uuid for facts in ranks if facts.gpus.own is not None}
    with_nccl = len(gpus) == len(ranks) and dist.is_nccl_available()
    backends = ["gloo", "apex", *(["nccl"] if with_nccl else [])]
    return Plan(rounds, backends, one_host=len(first_of) == 1)


def _connect(environment: Mapping[str, str], rank: int, timeout_s: float) -> dist.Store:
    address = environment.get("MASTER_ADDR")
    if not address or not environment.get("MASTER_PORT"):
        raise JobError("RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT")
    port = _number(environment, "MASTER_PORT", 1, 65535)
    # torchrun's agent hosts the store of its ranks.
    by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    make = partial(
        dist.TCPStore,
        address,
        port,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=not by_agent,
    )
    is_master, store = rank == 0 and not by_agent, None
    try:
        store = _within(3 * timeout_s, partial(make, is_master=is_master))
    except RuntimeError as error:
        if is_master:  # another process with rank 0 may own the port
            with contextlib.suppress(RuntimeError):
                store = _within(GRACE_S, partial(make, is_master=False))
        if store is None:
            raise JobError(
                f"the store at {address}:{port} was not reached within {timeout_s:g} s "
                f"({_line(error)}): check that rank 0 is running, and that no other program uses "
                "this port"
            ) from None
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"apex_doctor/{attempt}", store)


def _collect(store: dist.Store, world: int, timeout_s: float) -> list[Record]:
    """Records in rank order, without the ranks that do not report in time."""
    found = []
    until = time.monotonic() + timeout_s
    for rank in range(world):
        # Ranks after an absent one may have reported.
        while not store.check([f"record/{rank}"]) and time.monotonic() < until:
            time.sleep(0.02)
        if store.check([f"record/{rank}"]):
            found.append(_get(store, f"record/{rank}"))
    return found


def _all_reduce(backend: str, mine: Facts, timeout_s: float) -> measure.AllReduce:
    device = torch.device("cpu")
    if backend == "nccl" and mine.gpus.own is not None:
        device = torch.device("cuda", mine.gpus.own)
        torch.cuda.set_device(device)
    return measure.all_reduce(backend, device, timeout_s)


def _measure_pairs(decided: Plan) -> list[pairs.Pair]:
    """The measurements of all pairs, on every rank."""
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
    for pair in itertools.chain(*all_gather_object(mine)):
        found[pair.ranks] = pairs.better(pair, found.get(pair.ranks, pair))


def _failure(store: dist.Store, rank: int, world: int, text: str) -> str | None:
    """Report an error. Returns a conflict, or on rank 0 the errors of all ranks.

    A failure on one rank soon becomes a failure on all, so rank 0 gives the others time to report.
    """
    store.set(f"error/{rank}", text)
    if rank != 0:
        return _conflict(store)
    time.sleep(GRACE_S)
    texts = [
        f"rank {rank}: {store.get(f'error/{rank}').decode()}"
        for rank in range(world)
        if store.check([f"error/{rank}"])
    ]
    return _conflict(store) or f"{_FAILED} {'; '.join(texts[:3])}"


def _put(store: dist.Store, key: str, value: object) -> None:
    store.set(key, pickle.dumps(value).hex())


def _get(store: dist.Store, key: str) -> Any:
    """A value that a rank of the same job has stored, so unpickling it is safe."""
    return pickle.loads(bytes.fromhex(store.get(key).decode()))


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
