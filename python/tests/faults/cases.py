# SPDX-License-Identifier: BSD-3-Clause
"""The injected faults and their moments."""

from __future__ import annotations

import dataclasses
import os

from programs import OURS_ONLY, PROGRAMS

#: How much longer ranks wait where other tests run beside the campaign.
SLOWER = float(os.environ.get("APEX_FAULTS_SLOWER", "1"))
TIMEOUT = 8 * SLOWER  # s, of every process group
PAUSE = 5  # seconds, for a temporary fault
GRACE = 5 * SLOWER  # s, past the timeout
TO_START = 60  # seconds, until the fault is injected
TO_END = 20  # seconds, for a process that has finished; several end at a time
LATE = 3 * SLOWER  # seconds, for a rank that is late once
STALL = 1.0 * SLOWER  # seconds, after which the others report the stall

GOOD = ("raises", "goes on", "is named")
FAULTS = [
    "killed",
    "exits",
    "exception",
    "exception, caught",
    "stopped",
    "stopped for 5 s",
    "cut off",
    "cut off for 5 s",
    "sockets shut",
    "group closed",
]
STORE_FAULTS = ["killed", "stopped", "cut off"]  # also injected into rank 0, which hosts the store
#: This fault ends and raises nothing, but all ranks must learn which rank it is, and where.
DELAY = "late"


@dataclasses.dataclass(frozen=True)
class Case:
    program: str
    moment: str
    fault: str
    world: int
    culprit: int
    library: str

    def __str__(self) -> str:
        who = "the store's rank" if self.culprit == 0 else f"rank {self.culprit}"
        return f"{self.library}: {who} of {self.world} {self.fault}, {self.program}: {self.moment}"


@dataclasses.dataclass
class Outcome:
    verdict: str  # "goes on", "raises", or the failure
    seconds: float  # from the fault to the last survivor's end
    said: dict[int, str]  # messages by rank


#: The libraries, and their names on the page.
LIBRARIES = {"apex": "apex.parallel", "torch": "torch", "torch_apex": "torch, on `apex`"}


def is_delayed(library: str, world: int, moment: str) -> bool:
    """Not where torch's wrapper reports nothing and no rank waits for another."""
    return library == "apex" and world != 3 and moment != "exit"


def cases(library: str, worlds: list[int]) -> list[Case]:
    result = []
    for program, (_, moments) in PROGRAMS.items():
        if library != "apex" and program in OURS_ONLY:
            continue
        for moment in moments:
            for world in worlds:
                if moment == "shadowing":  # by the last rank, on a thread that cannot raise
                    faults = [(f, world - 1) for f in FAULTS if not f.startswith("exception")]
                else:
                    faults = [(f, 1) for f in FAULTS] + [(f, 0) for f in STORE_FAULTS]
                    if is_delayed(library, world, moment):
                        faults.append((DELAY, world - 1))
                result += [Case(program, moment, f, world, who, library) for f, who in faults]
    return result
