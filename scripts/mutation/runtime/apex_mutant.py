# SPDX-License-Identifier: BSD-3-Clause
"""Imported by mutated modules, and a pytest plugin. Corresponds to apex_mutant.h and
listener.cpp."""

import mmap
import os

_active = int(os.environ.get("APEX_MUTANT", "-1"))
_seen = None
if "APEX_MUTANT_SEEN" in os.environ:
    with open(os.environ["APEX_MUTANT_SEEN"], "r+b") as _file:
        _seen = mmap.mmap(_file.fileno(), 0)


def on(number: int) -> bool:
    if _seen is not None:
        _seen[number] = 1
    return number == _active


_outcomes: dict = {}
_imported = b""  # what imports reach, and so every test


def pytest_collection_finish() -> None:
    global _imported
    _imported = bytes(_seen or b"")


def pytest_runtest_logreport(report) -> None:
    seconds, outcome = _outcomes.get(report.nodeid, (0.0, "passed"))
    if report.outcome != "passed" and outcome != "failed":
        outcome = report.outcome
    _outcomes[report.nodeid] = seconds + report.duration, outcome


def pytest_runtest_logfinish(nodeid, location) -> None:
    if _seen is None or "APEX_MUTANT_RECORD" not in os.environ:
        return
    seconds, outcome = _outcomes.pop(nodeid, (0.0, "failed"))
    reached = " ".join(str(i) for i, byte in enumerate(_seen[:]) if byte or _imported[i])
    with open(os.environ["APEX_MUTANT_RECORD"], "a") as out:
        out.write(f"{nodeid}\t{outcome}\t{round(seconds * 1000)}\t{reached}\n")
    _seen[:] = bytes(len(_seen))
