# SPDX-License-Identifier: BSD-3-Clause
"""What is injected where."""

from __future__ import annotations

import dataclasses

from programs import OURS_ONLY, PROGRAMS

TIMEOUT = 8  # s, of every process group
PAUSE = 5  # s, of a fault that passes
GRACE = 5  # s, past the timeout
TO_START = 60  # s, until the fault strikes
TO_END = 20  # s, for a process that is through: several end at a time
LATE = 3  # s, of a rank that is late once
STALL = 1.0  # s, after which the others say so
SLOW = 0.05  # s, of a rank that is slow in every step
SLOW_STEPS = 14

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
STORE_FAULTS = ["killed", "stopped", "cut off"]  # also done to rank 0, which keeps the store
#: Of these nothing ends, and nothing is raised, but all ranks learn who it is, and where.
DELAYS = ["late", "slow"]


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
    verdict: str  # "goes on", "raises", or what is wrong
    seconds: float  # from the fault to the last survivor's end
    said: dict[int, str]  # rank: message


#: And what the page calls them.
LIBRARIES = {"apex": "apex.parallel", "torch": "torch", "torch_apex": "torch, on `apex`"}


def delays(library: str, program: str, moment: str, world: int) -> list[str]:
    """Where torch's wrapper has nothing to say, and who waits for nobody, there are none."""
    if library != "apex" or world == 3 or moment == "exit":
        return []
    if program == "join" or "construction" in moment:
        return ["late"]
    return DELAYS


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
                    faults += [(f, world - 1) for f in delays(library, program, moment, world)]
                result += [Case(program, moment, f, world, who, library) for f, who in faults]
    return result
