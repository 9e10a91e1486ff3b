# SPDX-License-Identifier: BSD-3-Clause
"""A mutant, and which ones are drawn."""

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
    number: int = -1  #: what APEX_MUTANT selects
    occurrence: int = 0  #: among equal changes of equal lines of the file
    turn: float = 0.0  #: from 0 to 1 in the order in which those of the area were drawn
    key: str = field(default="", init=False)

    def name(self) -> str:
        """The same after the file has moved to another folder or the line to another place."""
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
    """Each area's quota times `scale`, without what is `refused`.

    The order is that of hashes of the changed lines: editing one line of a source changes which
    mutants of that line are drawn, and hardly any other. `numbers` has those given out so far, and
    is added to, so that a source is written and compiled again only where its own mutants change.
    """
    seen: Counter[str] = Counter()
    for mutant in mutants:
        mutant.occurrence = 0  # where mutants were drawn before
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
