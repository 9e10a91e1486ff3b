# SPDX-License-Identifier: BSD-3-Clause
"""Stall reports: one of the waiting ranks prints which rank holds up the others.

The reference is the program itself, which decides which rank is late, and where.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ddp_support import free_port

import apex.parallel

HERE = Path(__file__).resolve().parent

#: By scenario, the text that the report must contain about the late rank.
SAYS = {
    "data": ["is in no collective", "in load_data", "its own work"],
    "store": ["is in no collective", "in load_data", "its own work"],
    "backward": ["in wait", "waits for the gradient of '0.", "in backward a layer or a hook"],
    "forward": ["is in no collective", "in forward"],
    "native": ["the interpreter's lock is not released"],
    "construction": ["is in no collective", "in load_data"],
    "one_after_the_other": ["is in no collective", "in one_after_the_other", "waits as well"],
    "stopped": ["is stopped (process ", "kill -CONT"],
}
OVER_SOCKETS = ["data", "backward", "construction"]


Verdicts = dict[str, list[tuple[int, str]]]


def start_job(host_channel: str, only: list[str]) -> list[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "APEX_STALL_SECONDS": "1.2",
        "APEX_HOST_CHANNEL": host_channel,
    }
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / "stalls_program.py"), str(port), str(rank), *only],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]


def read_job(processes: list[subprocess.Popen[str]]) -> Verdicts:
    """By scenario, the reports, and the ranks that have printed them."""
    found: Verdicts = {}
    printed = []
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        printed += re.findall(r"^apex: (rank .*(?:\n .*)*)", err, flags=re.MULTILINE)
        for line in out.splitlines():
            entry = json.loads(line)
            found.setdefault(entry["name"], [])
            if entry["verdict"] is not None:
                found[entry["name"]].append((rank, entry["verdict"]))
                assert [rank, entry["verdict"]] in entry["logged"], entry
            assert all(of == rank for of, _ in entry["logged"]), entry
    # Ranks that wait in different calls may print a report each.
    assert set(printed) >= {text for all_of in found.values() for _, text in all_of}
    assert len(found) <= len(printed) <= 2 * len(found), printed
    return found


@pytest.fixture(scope="module")
def jobs() -> dict[str, Verdicts]:
    """Two jobs at the same time, because they wait most of the time."""
    started = {"memory": start_job("1", []), "sockets": start_job("0", OVER_SOCKETS)}
    return {name: read_job(processes) for name, processes in started.items()}


def check_verdict(verdicts: Verdicts, name: str) -> None:
    culprit = {"store": 0, "forward": 2, "construction": 2, "one_after_the_other": 2}.get(name, 1)
    assert 1 <= len(verdicts[name]) <= 2, verdicts[name]
    # On a loaded machine the culprit may wait for another rank afterwards, and report that as well.
    by_others = [text for rank, text in verdicts[name] if rank != culprit]
    assert by_others
    for text in by_others:
        assert f"who:   rank {culprit} holds it up" in text
        assert re.findall(r"where: rank (\d)", text) == [str(culprit)]
        for part in SAYS[name]:
            assert part in text, text


@pytest.mark.processes
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are looked up in /proc")
@pytest.mark.parametrize("name", SAYS)
def test_stall_one_rank_names_who_is_late_and_where(jobs: dict[str, Verdicts], name: str) -> None:
    check_verdict(jobs["memory"], name)


@pytest.mark.processes
@pytest.mark.parametrize("name", OVER_SOCKETS)
def test_stall_over_sockets_is_the_same(jobs: dict[str, Verdicts], name: str) -> None:
    check_verdict(jobs["sockets"], name)


def test_stall_report_nothing_has_stalled_is_none() -> None:
    code = "import apex.parallel; assert apex.parallel.stall_report() is None"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert apex.parallel.stall_report.__doc__
