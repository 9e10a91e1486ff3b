# SPDX-License-Identifier: BSD-3-Clause
"""Writes the results as a page of the documentation."""

from __future__ import annotations

import re

from cases import (
    DELAYS,
    FAULTS,
    GOOD,
    LIBRARIES,
    STORE_FAULTS,
    TIMEOUT,
    Case,
    Outcome,
)

WHO = ("Rank 1", "The store's rank")
HEADER = """# Faults

What the other ranks do when something happens to one of them: with `apex.parallel`, and with
`torch.nn.parallel.DistributedDataParallel`, both over Gloo, and with the latter on the
[backend `apex`](backend.md). Written by `python python/tests/faults/campaign.py --output
docs/faults.md` (needs root, for network namespaces), with a group timeout of {timeout} s;
{counts}.

Something is done to rank 1, or to rank 0, whose process keeps the store, in the third of five
steps. "goes on": all ranks train to the end. "raises": every survivor raises; seconds are from the
fault to the last of these errors. With `apex.parallel` the error of every survivor says which rank
it is on, in which operation, and who is lost, and names nobody else: what does not is listed as
wrong. The programs and moments are in `python/tests/faults/programs.py`.

A rank that is late for three seconds, or slow in every step, ends nothing. "is named": with 2 and 4
ranks, one of those that wait has said once that it is the last rank, and every rank's
`straggler_report()` has it; where a gradient is late, with its layer.
"""


def _cell(outcomes: list[Outcome]) -> str:
    if not outcomes:
        return ""
    verdicts = sorted({outcome.verdict for outcome in outcomes})
    seconds = sorted(outcome.seconds for outcome in outcomes if outcome.verdict == "raises")
    if not seconds:
        return "; ".join(verdicts)
    span = f"{seconds[0]:.1f}"
    if seconds[-1] - seconds[0] > 0.05:
        span += f" to {seconds[-1]:.1f}"
    return "; ".join(verdicts).replace("raises", f"raises, {span} s")


def _sample(outcomes: dict[Case, Outcome], fault: str, store: bool) -> str:
    for case, outcome in outcomes.items():
        alike = case.fault == fault and (case.culprit == 0) == store and case.world == 3
        if alike and case.library == "apex" and case.moment in ("between launches", "with data"):
            for rank, text in sorted(outcome.said.items()):
                if rank != case.culprit:
                    return shorten(text).partition("\n")[0]  # without a traceback
    return ""


def markdown(outcomes: dict[Case, Outcome]) -> str:
    counts = []
    for library, title in LIBRARIES.items():
        mine = [outcome.verdict for case, outcome in outcomes.items() if case.library == library]
        if mine:
            good = sum(verdict in GOOD for verdict in mine)
            counts.append(f"{good} of {len(mine)} cases of {title} end as they should")
    lines = [HEADER.format(timeout=int(TIMEOUT), counts=", ".join(counts))]
    worlds = sorted({case.world for case in outcomes})
    lines.append(f"Each line stands for {', '.join(map(str, worlds))} ranks.\n")
    for store in (False, True):
        for fault in STORE_FAULTS if store else FAULTS:
            rows: dict[str, dict[str, list[Outcome]]] = {}
            for case, outcome in outcomes.items():
                if case.fault == fault and (case.culprit == 0) == store:
                    row = rows.setdefault(f"{case.program}: {case.moment}", {})
                    row.setdefault(case.library, []).append(outcome)
            if not rows:
                continue
            lines.append(f"## {WHO[store]} {fault}\n")
            if sample := _sample(outcomes, fault, store):
                lines.append(f"A survivor: `{sample}`\n")
            lines += [
                f"| where | {' | '.join(LIBRARIES.values())} |",
                "|---|" + "---|" * len(LIBRARIES),
            ]
            for where, row in rows.items():
                cells = [_cell(row.get(library, [])) for library in LIBRARIES]
                lines.append(f"| {where} | {' | '.join(cells)} |")
            lines.append("")
    for fault in DELAYS:
        mine = {case: outcome for case, outcome in outcomes.items() if case.fault == fault}
        if not mine:
            continue
        lines += [f"## The last rank is {fault}\n", "| where | apex.parallel |", "|---|---|"]
        places = dict.fromkeys(f"{case.program}: {case.moment}" for case in mine)
        for where in places:
            there = [o for case, o in mine.items() if f"{case.program}: {case.moment}" == where]
            lines.append(f"| {where} | {_cell(there)} |")
        lines.append("")
    return "\n".join(lines)


def shorten(message: str) -> str:
    """The error without the parts that Gloo and this package add to every error."""
    message = re.sub(r"\[/\S+/gloo/\S+\] ", "", message)
    message = re.sub(r"This is typically caused by .*?GLHF!\S* \S+ ", "", message)
    return re.sub(r"\(another rank has probably .*?process group\)", "", message)
