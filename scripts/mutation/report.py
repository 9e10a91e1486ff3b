# SPDX-License-Identifier: BSD-3-Clause
"""The results of a campaign, as text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import tomllib

from .areas import AREAS
from .model import Mutant

REASONS = Path(__file__).with_name("reasons.toml")

HEAD = """# Mutation testing

`scripts/mutate.py` breaks the engine in {total} places, one at a time, and runs the tests that
reach the place. This page is written by it (`--output`); seed {seed}. A mutant is caught if a test
fails, crashes or does not end. A reason, kept in `scripts/mutation/reasons.toml`, says why no test
tells a survivor from the original. What cannot change what any user sees is equivalent, and left
out of the percentage: caught / (mutants - equivalent).

| area | mutants | caught | of these, by a hang | equivalent | another reason | no reason | % |
|---|---|---|---|---|---|---|---|
"""


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


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"


def write(mutants: list[Mutant], verdicts: dict[str, list[str]], seed: int) -> str:
    """The page, in Markdown."""
    reasons = Reasons()
    judged = [mutant for mutant in mutants if mutant.key in verdicts]
    counts: Counter[tuple[str, str]] = Counter()
    for mutant in judged:
        verdict, by = verdicts[mutant.key]
        kind = "caught"
        if verdict != "caught":
            reason = "no reason" if reasons.of(mutant) is None else "reason"
            kind = "equivalent" if reasons.is_equivalent(mutant) else reason
        for area in (mutant.area, "all"):
            counts[area, "mutants"] += 1
            counts[area, "hang"] += "no end within" in by
            counts[area, kind] += 1
    text = HEAD.format(total=len(judged), seed=seed)
    columns = ("mutants", "caught", "hang", "equivalent", "reason", "no reason")
    for area in [area.name for area in AREAS] + ["all"]:
        row = [str(counts[area, column]) for column in columns]
        total = max(counts[area, "mutants"] - counts[area, "equivalent"], 1)
        row.append(f"{100 * counts[area, 'caught'] / total:.1f}")
        text += f"| {area} | " + " | ".join(row) + " |\n"
    text += "\n## By operator\n\n"
    text += "| operator | mutants | caught |\n|---|---|---|\n"
    operators = Counter(mutant.operator for mutant in judged)
    for operator, number in sorted(operators.items()):
        own = [m for m in judged if m.operator == operator and verdicts[m.key][0] == "caught"]
        text += f"| {operator} | {number} | {len(own)} |\n"
    text += "\n## Not caught\n\n"
    for mutant in judged:
        verdict, by = verdicts[mutant.key]
        if verdict == "caught":
            continue
        place, after = f"{mutant.path}:{mutant.line}", f"{verdict} {by}".strip()
        text += f"- `{place}`, {mutant.operator}, {after}: {_code(mutant.change)}.\n"
        text += f"  {reasons.of(mutant) or '**No reason given.**'}\n"
    return text


def table(mutants: list[Mutant], verdicts: dict[str, list[str]]) -> str:
    """All mutants, tab-separated."""
    rows = ["number\tplace\toperator\tchange\tline\tverdict\tby"]
    for m in mutants:
        verdict, by = verdicts.get(m.key, ["not run", ""])
        place = f"{m.path}:{m.line}"
        rows.append("\t".join((str(m.number), place, m.operator, m.change, m.text, verdict, by)))
    return "\n".join(rows) + "\n"
