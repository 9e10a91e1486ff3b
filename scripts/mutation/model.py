# SPDX-License-Identifier: BSD-3-Clause
"""The class of a mutant, and the selection of mutants."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .areas import AREAS


@dataclass
class Mutant:
    """One change at one place. `begin` and `end` are byte offsets into a C++ file."""

    path: str
    line: int
    last_line: int
    text: str  #: the source line, stripped
    operator: str
    change: str  #: "before -> after"
    begin: int = 0
    end: int = 0
    replacement: str = ""
    statement: bool = False
    area: str = ""
    number: int = -1  #: selected by APEX_MUTANT
    occurrence: int = 0  #: index among identical changes of identical lines in the file
    turn: float = 0.0  #: from 0 to 1, the order in which the area's mutants were drawn
    key: str = field(default="", init=False)

    def name(self) -> str:
        """An identifier that does not change if the file or the line moves."""
        parts = (Path(self.path).name, self.text, self.change, str(self.occurrence))
        return " | ".join(parts)


def source_files(root: Path) -> dict[str, str]:
    """Paths of all sources, relative to `root`, and the area of each."""
    found: dict[str, str] = {}
    for area in AREAS:
        for pattern in area.globs:
            for path in sorted(root.glob(pattern)):
                if not any(path.match(without) for without in area.without):
                    found.setdefault(path.relative_to(root).as_posix(), area.name)
    return found


def draw(
    mutants: list[Mutant], seed: int, scale: float, refused: set[str], numbers: dict[str, int]
) -> list[Mutant]:
    """Draw each area's quota times `scale`, except `refused` mutants.

    The order is by hashes of the changed lines. So editing one line of a source affects which
    mutants of that line are drawn, and hardly any others. `numbers` contains the numbers assigned
    so far and is extended, so that a source is compiled again only if its own mutants change.
    """
    seen: Counter[str] = Counter()
    for mutant in mutants:
        mutant.occurrence = 0  # mutants may have been drawn before
        base = mutant.name()
        mutant.occurrence = seen[base]
        seen[base] += 1
        mutant.key = mutant.name()
    chosen: list[Mutant] = []
    for area in AREAS:
        own = [m for m in mutants if m.area == area.name and m.key not in refused]
        own.sort(key=lambda m: hashlib.sha256(f"{seed} {m.key}".encode()).digest())
        own = own[: round(area.quota * scale)]
        for place, mutant in enumerate(own):
            mutant.turn = place / len(own)
        chosen += own
    chosen.sort(key=lambda m: (m.path, m.line, m.begin))
    for mutant in chosen:
        mutant.number = numbers.setdefault(mutant.key, len(numbers))
    return chosen
