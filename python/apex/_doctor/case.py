# SPDX-License-Identifier: BSD-3-Clause
"""The input of the doctor's rules, and the recommendations that they return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from apex._doctor.facts import Facts
from apex._doctor.measure import AllReduce
from apex._doctor.pairs import Slow
from apex._doctor.self_test import SelfTest


@dataclass(frozen=True)
class Recommendation:
    """One thing to change.

    Attributes:
        rule: the name of the rule, a function in ``rules``.
        finding: what was found, and where.
        remedy: what to do.
    """

    rule: str
    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.finding}: {self.remedy}."


@dataclass(frozen=True)
class Case:
    """The facts and measurements that the rules evaluate.

    Attributes:
        ranks: the facts of each rank of the job, or of this process if there is no job.
        measured: all-reduces by backend.
        not_shared: why the backend `apex` did not share memory here; None if it did, or if it was
            not measured.
        slow: slow pairs and ranks of the job.
    """

    ranks: Sequence[Facts]
    self_tests: Sequence[SelfTest] = ()
    measured: Sequence[AllReduce] = ()
    not_shared: str | None = None
    slow: Sequence[Slow] = ()

    @property
    def is_job(self) -> bool:
        return len(self.ranks) > 1

    @property
    def hosts(self) -> Mapping[tuple[str, str], list[Facts]]:
        """The ranks of each host, in rank order."""
        found: dict[tuple[str, str], list[Facts]] = {}
        for facts in self.ranks:
            found.setdefault(facts.place.key, []).append(facts)
        return found

    @property
    def machines(self) -> list[list[Facts]]:
        """The ranks that share cores. Containers of one machine count as separate hosts."""
        found: dict[str, list[Facts]] = {}
        for facts in self.ranks:
            found.setdefault(facts.place.boot, []).append(facts)
        return list(found.values())

    def on(self, having: Iterable[Facts]) -> str:
        """Text such as `` on ranks 0 and 2``; empty without a job."""
        ranks = [facts.place.rank for facts in having]
        if not self.is_job:
            return ""
        return " on all ranks" if len(ranks) == len(self.ranks) else f" on {ranks_text(ranks)}"

    def on_host(self, facts: Facts) -> str:
        """Text such as `` on host a``; empty if all ranks are on one host."""
        return f" on host {facts.place.host}" if len(self.hosts) > 1 else ""


def ranks_text(ranks: Iterable[int]) -> str:
    """Text such as ``rank 3``, ``ranks 0 and 2`` or ``ranks 0 to 3, 7 and 9``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    text = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"rank {text}" if text.isdecimal() else f"ranks {text}"
