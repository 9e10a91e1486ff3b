"""What the campaign found, as text."""

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
tells a survivor from the original.

| area | mutants | caught | of these, by a hang | survived | with a reason | never reached |
|---|---|---|---|---|---|---|
"""


class Reasons:
    """Entries of reasons.toml: `line` and `change` as in the report, wherever the line is now."""

    def __init__(self) -> None:
        entries = tomllib.loads(REASONS.read_text())["mutant"] if REASONS.exists() else []
        self._known = {(entry["line"], entry["change"]): entry["reason"] for entry in entries}

    def of(self, mutant: Mutant) -> str | None:
        return self._known.get((mutant.text, mutant.change))


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|").replace("`", "'") + "`"


def write(mutants: list[Mutant], verdicts: dict[str, list[str]], seed: int) -> str:
    """The page, in Markdown."""
    reasons = Reasons()
    judged = [mutant for mutant in mutants if mutant.key in verdicts]
    counts: Counter[tuple[str, str]] = Counter()
    for mutant in judged:
        verdict, by = verdicts[mutant.key]
        for area in (mutant.area, "all"):
            counts[area, "mutants"] += 1
            counts[area, verdict] += 1
            counts[area, "hang"] += "no end within" in by
            counts[area, "reason"] += verdict != "caught" and reasons.of(mutant) is not None
    text = HEAD.format(total=len(judged), seed=seed)
    columns = ("mutants", "caught", "hang", "survived", "reason", "not reached")
    for area in [area.name for area in AREAS] + ["all"]:
        row = [str(counts[area, column]) for column in columns]
        text += f"| {area} | " + " | ".join(row) + " |\n"
    caught, total = counts["all", "caught"], max(counts["all", "mutants"], 1)
    text += f"\nCaught: {100 * caught / total:.1f} %. "
    left = counts["all", "mutants"] - caught - counts["all", "reason"]
    text += f"Neither caught nor with a reason: {left}.\n\n## By operator\n\n"
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
