# SPDX-License-Identifier: BSD-3-Clause
"""Injects faults into one rank of small training programs, and checks the behavior of the others.

    python python/tests/faults/campaign.py                    # everything
    python python/tests/faults/campaign.py --only killed:plain --worlds 2 --library apex

In every case, ``world`` processes train for five steps. In the third step, at a named moment, a
fault is injected into one of them. A survivor must end within the timeout of its group plus five
seconds. If it raises, its error must name the operation and the culprit, and no other rank. It must
never abort, and nothing may be left behind. ``--library torch`` runs torch's
DistributedDataParallel over Gloo, ``--library torch_apex`` runs it on the backend ``apex``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cases import (
    DELAY,
    GOOD,
    GRACE,
    LATE,
    LIBRARIES,
    PAUSE,
    STALL,
    TIMEOUT,
    TO_END,
    TO_START,
    Case,
    Outcome,
    cases,
)
from hosts import Hosts
from programs import LAYERS, PROGRAMS

HERE = Path(__file__).resolve().parent
#: The reports of ranks that are all alive but call different collectives.
APART = "out of step|in different batch norm layers|in different collectives|and none has ended"


class Zygote:
    def __init__(self) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self._number = 0
        self.buffer = b""
        assert self._process.stdout is not None
        assert json.loads(self._process.stdout.readline())["ready"]
        os.set_blocking(self._process.stdout.fileno(), False)

    def start(self, case: dict[str, Any]) -> int:
        self._number += 1
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**case, "id": self._number}) + "\n")
        self._process.stdin.flush()
        return self._number

    def poll(self) -> None:
        assert self._process.stdout is not None
        try:
            self.buffer += os.read(self._process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            event = json.loads(line)
            if "started" in event:
                self.pids[event["started"]] = event["pid"]
            else:
                self.ended[event["ended"]] = event["status"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def free_port() -> int:
    """A port below the range that the system assigns to connections, which could take it first."""
    while True:
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", random.randrange(10000, 28000)))
            return one.getsockname()[1]


def processes_of(pids: list[int]) -> dict[int, str]:
    """The processes that still run in the sessions of the ranks, and what each does."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may end meanwhile
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) in pids and fields[0] != "Z":
                    found[int(entry.name)] = f"{fields[0]} {(entry / 'wchan').read_text()}"
    return found


class Running:
    """A running case. Call ``step()`` until it returns the outcome."""

    def __init__(self, zygote: Zygote, case: Case, hosts: Hosts | None) -> None:
        self.case, self._zygote, self._hosts = case, zygote, hosts
        self._folder = Path(tempfile.mkdtemp(prefix="apex-fault-"))
        self._struck: float | None = None
        self._undone = False
        self._begun = time.time()
        self.paused = 0.0  # seconds in which the machine did not let the campaign run
        port = free_port()
        self._ids = []
        for rank in range(case.world):
            (self._folder / str(rank)).mkdir()
            self._ids.append(
                zygote.start(
                    {
                        **dataclasses.asdict(case),
                        "rank": rank,
                        "timeout": TIMEOUT,
                        "address": hosts.address(0) if hosts else "127.0.0.1",
                        "port": port,
                        "host": hosts.names[rank] if hosts else "",
                        "environment": {
                            "APEX_STALL_SECONDS": str(STALL) if case.fault == "late" else "10",
                            **({"GLOO_SOCKET_IFNAME": "eth0"} if hosts else {}),
                        },
                        "late": LATE,
                        "report": str(self._folder / f"{rank}.jsonl"),
                        "log": str(self._folder / f"{rank}.log"),
                        "folder": str(self._folder / str(rank)),
                        "go": str(self._folder / "go"),
                    }
                )
            )

    def _events(self, rank: int) -> list[dict[str, Any]]:
        path = self._folder / f"{rank}.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def _log(self, rank: int) -> str:
        path = self._folder / f"{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _alive(self, rank: int) -> bool:
        return self._ids[rank] not in self._zygote.ended

    def step(self) -> Outcome | None:
        case = self.case
        fault, culprit = case.fault, case.culprit
        pid = self._zygote.pids.get(self._ids[culprit])
        if self._struck is None:
            for event in self._events(culprit):
                if "struck" in event:
                    self._struck = event["time"]
                    self._do(fault, pid)
        elif not self._undone and fault.endswith("5 s") and time.time() > self._struck + PAUSE:
            self._undone = True
            if fault.startswith("stopped"):
                os.kill(pid, signal.SIGCONT)
            else:
                self._hosts.join(culprit)
        survivors = [rank for rank in range(case.world) if rank != culprit]
        waited_for = survivors
        if not fault.startswith(("killed", "exits")) and fault != "stopped":
            waited_for = list(range(case.world))  # the culprit lives, and has to end too
        limit = TIMEOUT + GRACE + (PAUSE if fault.endswith("5 s") else 0) + self.paused
        start = self._struck if self._struck is not None else self._begun + TO_START
        alive = [rank for rank in waited_for if self._alive(rank)]
        if alive and time.time() < start + limit:
            return None
        hung = [rank for rank in alive if not self._is_through(rank)]
        if alive and not hung and time.time() < start + limit + TO_END:
            return None
        pids = [self._zygote.pids[self._ids[rank]] for rank in alive]
        if alive and not processes_of(pids) and time.time() < start + limit + 5 * TO_END:
            return None  # they have ended, and the zygote has not been scheduled since
        return self._judge(survivors, waited_for, hung or alive)

    def _is_through(self, rank: int) -> bool:
        events = self._events(rank)
        return bool(events) and ("done" in events[-1] or "message" in events[-1])

    def _do(self, fault: str, pid: int | None) -> None:
        assert pid is not None
        if fault.startswith("stopped"):
            os.kill(pid, signal.SIGSTOP)
        elif fault.startswith("cut off"):
            assert self._hosts is not None
            self._hosts.cut(self.case.culprit)
        (self._folder / "go").touch()

    def _judge(self, survivors: list[int], waited_for: list[int], hung: list[int]) -> Outcome:
        case = self.case
        pids = [self._zygote.pids[one] for one in self._ids]
        doing = {rank: processes_of([pids[rank]]) for rank in hung}
        if os.environ.get("APEX_FAULTS_STACKS"):
            for rank in hung:
                for pid in doing[rank]:
                    bt = ["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 14"]
                    print(pid, subprocess.run(bt, capture_output=True, text=True).stdout)
        for rank in range(case.world):
            if self._alive(rank):
                for pid in processes_of([pids[rank]]):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        if self._hosts is not None:
            self._hosts.join(case.culprit)  # even if the case has ended before its 5 s
        said: dict[int, str] = {}
        ends, problems = [], []
        wrong: Counter[str] = Counter()
        for rank in range(case.world):
            events = self._events(rank)
            last = events[-1] if events else {}
            if "message" in last:
                said[rank] = f"{last['raised']}: {last['message']}"
            if rank in survivors:
                ends.append(last.get("time", time.time()))
            log = self._log(rank)
            if "terminate called" in log or "Segmentation" in log:
                problems.append(f"rank {rank} aborts: {log.strip().splitlines()[-1][:200]}")
            elif rank not in hung and rank in waited_for:
                status = self._zygote.ended[self._ids[rank]]
                if os.WIFSIGNALED(status):
                    problems.append(f"rank {rank} ended by signal {os.WTERMSIG(status)}")
        if self._struck is None:
            for rank in range(case.world):
                print(f"rank {rank}: {self._log(rank)[-300:]}")
            problems.append("the fault never struck")
        if hung:
            through = all(self._is_through(rank) for rank in hung)
            problems.append(f"ranks {hung} {'do not end' if through else 'hang'}")
        raising = [rank for rank in survivors if rank in said]
        for rank in raising:
            if case.library == "apex":
                wrong.update(complaints(case, rank, said[rank]))
        problems += [f"{text} ({count} of {len(survivors)})" for text, count in wrong.items()]
        named = not problems and not raising and case.fault == DELAY
        if case.fault == DELAY and not hung and self._struck is not None:
            problems += [f"raises: {text}" for text in said.values()]
            logs = [self._log(rank) for rank in range(case.world)]
            problems += late_complaints(case, logs)
        if raising and len(raising) < len(survivors) and not hung:
            done = sorted(set(survivors) - set(raising))
            if case.moment != "exit" and case.fault not in (
                "exits",
                "killed",
                "exception",
                "group closed",
            ):
                problems.append(f"ranks {done} go on while {raising} raise")
        time.sleep(0.02)
        left = processes_of(pids)
        for one in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        files = [str(p) for rank in range(case.world) for p in (self._folder / str(rank)).iterdir()]
        if files:
            problems.append(f"left behind: {files}")
        shutil.rmtree(self._folder, ignore_errors=True)
        verdict = "; ".join(problems) or ("raises" if raising else "goes on")
        if named and verdict == "goes on":
            verdict = "is named"
        seconds = max(ends) - self._struck if self._struck and ends else 0.0
        said.update({rank: f"{said.get(rank, '')} processes: {doing[rank]}" for rank in hung})
        return Outcome(verdict, seconds, said)


def late_complaints(case: Case, logs: list[str]) -> list[str]:
    """The requirements that the single report of a stall does not meet."""
    blocks = re.findall(r"^apex: rank .*(?:\n .*)*", "\n".join(logs), flags=re.MULTILINE)
    blocks = [one for one in blocks if "no rank is late" not in one]  # reports of a busy machine
    if len(blocks) != 1:
        return [f"{len(blocks)} verdicts: {blocks}"]
    result = []
    if f"who:   rank {case.culprit} holds it up" not in blocks[0]:
        result.append(f"blames another rank: {blocks[0]}")
    layer = LAYERS.get(case.moment) if case.program == "plain" else None
    if layer is not None and f"its last gradient was that of '{layer}." not in blocks[0]:
        result.append(f"does not name the gradient: {blocks[0]}")
    return result


def complaints(case: Case, rank: int, message: str) -> list[str]:
    """The requirements that a survivor's error does not meet."""
    operation = PROGRAMS[case.program][1][case.moment]
    result = []
    if f"rank {rank}" not in message:
        result.append("the error does not say whose it is")
    told = re.search(rf"backward was ended by|{APART}", message)
    if operation and not told and not re.search(operation, message):
        result.append("the error does not name the operation")
    named = set()
    for group in re.findall(r"\branks? ([\d, ]+) (?:has|have|is|are) ", message):
        named |= {int(number) for number in group.split(",")}
    # Ranks that are alive and have reported what they did.
    exception = re.search(r"ended by an exception on rank (\d+)", message) or re.search(
        r"rank (\d+) failed in communication hook", message
    )
    if exception:
        named.add(int(exception[1]))
    elif re.search(f"({APART}).*rank {case.culprit} ", message):
        named.add(case.culprit)
    named -= {rank}
    if named - {case.culprit}:
        result.append(f"blames rank {sorted(named - {case.culprit})}")
    elif case.fault == "sockets shut":
        pass  # every rank is alive and reports, but the owner of the broken connections is unknown
    elif case.culprit not in named and not (case.culprit == 0 and "the store" in message):
        result.append("does not name the culprit")
    return result


def shorten(message: str) -> str:
    """The error without the parts that Gloo and this package add to every error."""
    message = re.sub(r"\[/\S+/gloo/\S+\] ", "", message)
    message = re.sub(r"This is typically caused by .*?GLHF!\S* \S+ ", "", message)
    return re.sub(r"\(another rank has probably .*?process group\)", "", message)


def run(todo: list[Case], at_once: int, verbose: bool) -> dict[Case, Outcome]:
    zygote = Zygote()
    networks = any(case.fault.startswith("cut off") for case in todo)
    hosts = [Hosts(slot, 4) for slot in range(at_once)] if networks else []
    running: dict[int, Running] = {}
    outcomes: dict[Case, Outcome] = {}
    waiting = list(reversed(todo))
    try:
        while waiting or running:
            for slot in range(at_once):
                if slot not in running and waiting:
                    case = waiting.pop()
                    apart = case.fault.startswith("cut off")
                    running[slot] = Running(zygote, case, hosts[slot] if apart else None)
            before = time.monotonic()
            time.sleep(0.02)
            zygote.poll()
            paused = max(0.0, time.monotonic() - before - 1)
            for slot, one in list(running.items()):
                one.paused += paused
                if all(number in zygote.pids for number in one._ids) and (outcome := one.step()):
                    outcomes[one.case] = outcome
                    del running[slot]
                    good = outcome.verdict in GOOD
                    if verbose or not good:
                        print(f"{one.case}: {outcome.verdict} ({outcome.seconds:.1f} s)")
                        if not good:
                            for rank, text in outcome.said.items():
                                print(f"    rank {rank}: {shorten(text)[:500]}")
                        sys.stdout.flush()
    finally:
        zygote.close()
        for one in hosts:
            one.close()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--only", nargs="*", default=[], help="parts of FAULT:PROGRAM:MOMENT")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    todo = [case for library in arguments.library for case in cases(library, arguments.worlds)]
    todo = [
        case
        for case in todo
        if not arguments.only
        or any(part in f"{case.fault}:{case.program}:{case.moment}:" for part in arguments.only)
    ]
    outcomes = run(todo, arguments.at_once, arguments.verbose)
    for library in arguments.library:
        mine = [outcome.verdict for case, outcome in outcomes.items() if case.library == library]
        good = sum(verdict in GOOD for verdict in mine)
        print(f"{library}: {good} of {len(mine)} cases are as they should be")


if __name__ == "__main__":
    main()
