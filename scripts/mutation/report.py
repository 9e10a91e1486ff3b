# SPDX-License-Identifier: BSD-3-Clause
"""Reasons why mutants survive, and the table of a campaign."""

from __future__ import annotations

from pathlib import Path

import tomllib

from .model import Mutant

REASONS = Path(__file__).with_name("reasons.toml")


class Reasons:
    """Entries of reasons.toml. They match `line` and `change` of the report, not the line
    number."""

    def __init__(self) -> None:
        entries = tomllib.loads(REASONS.read_text())["mutant"] if REASONS.exists() else []
        self._known = {(entry["line"], entry["change"]): entry["reason"] for entry in entries}

    def of(self, mutant: Mutant) -> str | None:
        return self._known.get((mutant.text, mutant.change))

    def is_equivalent(self, mutant: Mutant) -> bool:
        return (self.of(mutant) or "").startswith("Equivalent:")


def table(mutants: list[Mutant], verdicts: dict[str, list[str]]) -> str:
    """All mutants, tab-separated."""
    rows = ["number\tplace\toperator\tchange\tline\tverdict\tby"]
    for m in mutants:
        verdict, by = verdicts.get(m.key, ["not run", ""])
        place = f"{m.path}:{m.line}"
        rows.append("\t".join((str(m.number), place, m.operator, m.change, m.text, verdict, by)))
    return "\n".join(rows) + "\n"
