# SPDX-License-Identifier: BSD-3-Clause
"""Writes the results as a page of the documentation."""

from __future__ import annotations

import re

from cases import GOOD, LIBRARIES, TIMEOUT, Case, Outcome

HEADER = """# Faults

What the other ranks do when something happens to one of them: with `apex.parallel`, and with
`torch.nn.parallel.DistributedDataParallel`, both over Gloo, and with the latter on the
[backend `apex`](backend.md). Written by `python python/tests/faults/campaign.py --output
FILE` (needs root, for network namespaces), with a group timeout of {timeout} s;
{counts}.

Something is done to a rank in the third of five steps, at each moment of
`python/tests/faults/programs.py`, with {worlds} ranks. Rank 0 keeps the store. A cell counts the
moments at which every survivor raises, with the seconds from the fault to the last error, and those
at which all ranks train to the end. With `apex.parallel` every error names the rank it is on, the
operation and the culprit, and no other rank.
"""


def _cell(outcomes: list[Outcome]) -> str:
    parts = []
    for verdict in sorted({outcome.verdict for outcome in outcomes}):
        alike = [outcome for outcome in outcomes if outcome.verdict == verdict]
        text = f"{len(alike)} {verdict}"
        if verdict == "raises":
            seconds = [outcome.seconds for outcome in alike]
            text += f" ({min(seconds):.1f} to {max(seconds):.1f} s)"
        parts.append(text)
    return ", ".join(parts)


def markdown(outcomes: dict[Case, Outcome]) -> str:
    counts = []
    rows: dict[str, dict[str, list[Outcome]]] = {}
    for library, title in LIBRARIES.items():
        mine = {case: outcome for case, outcome in outcomes.items() if case.library == library}
        if mine:
            good = sum(outcome.verdict in GOOD for outcome in mine.values())
            counts.append(f"{good} of {len(mine)} cases of {title} end as they should")
        for case, outcome in mine.items():
            what = f"{'rank 0' if case.culprit == 0 else 'another rank'} {case.fault}"
            rows.setdefault(what, {}).setdefault(library, []).append(outcome)
    worlds = ", ".join(map(str, sorted({case.world for case in outcomes})))
    lines = [HEADER.format(timeout=int(TIMEOUT), counts=", ".join(counts), worlds=worlds)]
    lines.append(f"| what | {' | '.join(LIBRARIES.values())} |")
    lines.append("|---|" + "---|" * len(LIBRARIES))
    for what, row in rows.items():
        cells = [_cell(row.get(library, [])) for library in LIBRARIES]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shorten(message: str) -> str:
    """The error without the parts that Gloo and this package add to every error."""
    message = re.sub(r"\[/\S+/gloo/\S+\] ", "", message)
    message = re.sub(r"This is typically caused by .*?GLHF!\S* \S+ ", "", message)
    return re.sub(r"\(another rank has probably .*?process group\)", "", message)
