# SPDX-License-Identifier: BSD-3-Clause
"""The doctor's findings as text and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from apex._doctor import job, measure, network, pairs
from apex._doctor.case import Case, Recommendation, ranks_text
from apex._doctor.facts import Facts
from apex._doctor.rules import recommend

#: If there are more pairs, only the slowest are shown.
MOST_PAIRS = 28
_WIDTH = 13


@dataclass(frozen=True)
class Report:
    """Everything that is printed.

    Attributes:
        case: facts and measurements.
        pairs: the measured pairs of a job.
        problems: why measurements are missing; empty if none is.
        recommendations: at most five.
    """

    case: Case
    pairs: Sequence[pairs.Pair] = ()
    problems: Sequence[str] = ()
    recommendations: Sequence[Recommendation] = field(default=())

    @property
    def has_failed(self) -> bool:
        return bool(self.problems) or not all(test.has_passed for test in self.case.self_tests)


def make(case: Case, links: Sequence[pairs.Pair], problems: Sequence[str]) -> Report:
    return Report(case, links, problems, recommend(case))


def as_json(report: Report) -> dict[str, Any]:
    """The report in plain types. Keys: ``ranks``, ``self_tests``, ``all_reduces``, ``pairs``,
    ``slow``, ``problems`` and ``recommendations``.
    """
    case = report.case
    return {
        "ranks": [asdict(facts) for facts in case.ranks],
        "self_tests": [asdict(t) | {"has_passed": t.has_passed} for t in case.self_tests],
        "all_reduces": [asdict(one) for one in case.measured],
        "not_shared": case.not_shared,
        "pairs": [asdict(one) for one in report.pairs],
        "slow": [asdict(one) for one in case.slow],
        "problems": list(report.problems),
        "recommendations": [asdict(one) for one in report.recommendations],
    }


def as_text(report: Report) -> str:
    case = report.case
    lines = [_title(case), *_facts(case.ranks[0])]
    if case.is_job:
        lines += ["", *_hosts(case)]
    lines += _section("batch norm against float64, largest error", _self_tests(case))
    members = f"{len(case.ranks)} ranks" if case.is_job else "two processes here"
    lines += _section(f"all-reduce, {members}", _all_reduces(case.measured))
    lines += _section("messages from rank to rank over Gloo, one way", _pairs(report))
    lines += ["", *(f"failed: {problem}." for problem in report.problems)]
    lines += [f"{number}. {one}" for number, one in enumerate(report.recommendations, 1)]
    if not report.recommendations:
        lines.append("nothing to change" + (" was found so far" if report.problems else ""))
    return "\n".join(map(printable, lines))


def printable(line: str) -> str:
    """Escape control characters, because values of variables may contain newlines."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _title(case: Case) -> str:
    if not case.is_job:
        return f"apex.doctor on {case.ranks[0].place.host}"
    hosts = len(case.hosts)
    return (
        f"apex.doctor on {len(case.ranks)} ranks of {hosts} host{'s' if hosts > 1 else ''}; "
        f"rank 0 is on {case.ranks[0].place.host}"
    )


def _row(name: str, text: str) -> str:
    return f"  {name:<{_WIDTH}} {text}"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *lines] if lines else []


def _facts(facts: Facts) -> Iterator[str]:
    build = facts.build
    yield _row(
        "apex",
        f"{build.apex}, built for torch {build.built_for} by {build.compiler}, "
        f"_GLIBCXX_USE_CXX11_ABI={int(build.cxx11_abi)}",
    )
    yield _row("torch", f"{build.torch}, Python {build.python}")
    for name, there, reason in (
        ("CUDA parts", build.with_cuda, build.cuda_reason),
        ("NCCL backend", build.with_nccl, build.nccl_reason),
    ):
        yield _row(name, f"{'ON' if there else 'OFF'} ({reason})")
    gpus = ", ".join(facts.gpus.names) or "none that torch can use"
    files = facts.gpus.device_files
    yield _row("GPUs", gpus + (f", {files} in the system" if files > len(facts.gpus.names) else ""))
    yield _row("cores", _cores(facts))
    yield _row("memory", _memory(facts))
    yield _row("limits", _limits(facts))
    yield _row("network", ", ".join(map(_card, facts.cards)))
    yield _row("Gloo takes", _gloo(facts))


def _cores(facts: Facts) -> str:
    own = facts.processors
    parts = [f"{len(own.affinity)} of {own.online}"]
    parts.append("no CPU limit" if own.quota is None else f"CPU limit {own.quota:g}")
    parts.append(f"{own.threads} thread{'s' if own.threads > 1 else ''} a process")
    parts.append(own.capability)
    parts += [f"governor {own.governor}"] if own.governor else []
    parts.append(f"load {own.load:.1f}")
    return ", ".join(parts)


def _memory(facts: Facts) -> str:
    memory = facts.memory
    parts = [f"{_gib(memory.available)} of {_gib(memory.total)} available"]
    parts.append("no limit" if memory.limit is None else f"limit {_gib(memory.limit)}")
    parts.append(f"swap in use: {_gib(memory.swap_used)}" if memory.swap_used else "no swap in use")
    parts.append("no /dev/shm" if memory.shm is None else f"/dev/shm {_gib(memory.shm)}")
    return ", ".join(parts)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _limits(facts: Facts) -> str:
    def text(limit: int | None) -> str:
        return "unlimited" if limit is None else str(limit)

    limits = facts.limits
    return (
        f"open files {text(limits.open_files)} (hard limit {text(limits.most_open_files)}), "
        f"file size {text(limits.file_bytes)}"
    )


def _card(card: network.Card) -> str:
    parts = [card.name, *card.addresses]
    parts += [f"({card.speed_mbit / 1000:g} Gbit/s)"] if card.speed_mbit else []
    parts += [] if card.is_up else ["(down)"]
    return " ".join(parts)


def _gloo(facts: Facts) -> str:
    taken = ", ".join(
        f"{card.address or 'no address'} of {card.name or 'no card'}" for card in facts.gloo.cards
    )
    why = {
        "host name": f"the host name {facts.place.host}",
        "no address": f"the host name {facts.place.host} has no address of this host",
    }.get(facts.gloo.why, facts.gloo.why)
    local = all(card.address and network.is_loopback(card.address) for card in facts.gloo.cards)
    return f"{taken} ({why})" + (": for ranks of this host only" if local else "")


def _hosts(case: Case) -> Iterator[str]:
    rows = [("host", "ranks", "cores", "threads", "GPUs", "Gloo takes")]
    for ranks in case.hosts.values():
        facts = ranks[0]
        rows.append(
            (
                facts.place.host,
                ranks_text(one.place.rank for one in ranks).partition(" ")[2],
                str(len({core for one in ranks for core in one.processors.affinity})),
                str(sum(one.processors.threads for one in ranks)),
                str(len(facts.gpus.names)),
                ", ".join(card.address or "no address" for card in facts.gloo.cards),
            )
        )
    yield from _table(rows)


def _self_tests(case: Case) -> list[str]:
    lines = []
    for kind in dict.fromkeys(test.device.partition(":")[0] for test in case.self_tests):
        tests = [t for t in case.self_tests if t.device.partition(":")[0] == kind]
        parts = []
        for dtype in dict.fromkeys(test.dtype for test in tests):
            errors = [t.error for t in tests if t.dtype == dtype and t.error is not None]
            parts.append(f"{dtype} {max(errors):.0e}" if errors else f"{dtype} none")
        failed = [test for test in tests if not test.has_passed]
        lines.append(_row(kind, f"{'FAILED' if failed else 'passed'}: {', '.join(parts)}"))
        for test in failed:
            why = test.problem or f"{test.error:.0e} is above {test.tolerance:.0e}"
            lines.append(_row("", f"{test.dtype} on {test.device} of rank {test.rank}: {why}"))
    return lines


def _all_reduces(measured: Sequence[measure.AllReduce]) -> list[str]:
    if not measured:
        return []
    sizes = f"{measure.LATENCY_BYTES >> 10} KiB", f"{measure.BANDWIDTH_BYTES >> 20} MiB"
    rows = [("backend", *sizes, "")]
    for one in measured:
        note = "of GPU tensors" if one.backend == "nccl" else ""
        if one.shares_memory is not None:
            note = f"{'' if one.shares_memory else 'not '}in shared memory"
        latency, rate = f"{one.latency_s * 1e6:.1f} us", f"{one.bytes_per_s / 1e9:.2f} GB/s"
        rows.append((one.backend, latency, rate, note))
    return [*_table(rows), "  (medians; GB/s: bytes of the tensor by the time of one all-reduce)"]


def _pairs(report: Report) -> list[str]:
    if not report.pairs:
        is_left_out = len(report.case.ranks) > job.MOST_LOCAL_RANKS and not report.problems
        most = f"more than {job.MOST_LOCAL_RANKS} ranks of one host"
        return [f"  not measured among {most}"] if is_left_out else []
    host = {facts.place.rank: facts.place.host for facts in report.case.ranks}
    several = len(report.case.hosts) > 1
    rows = [("ranks", "latency", f"{measure.MESSAGE_BYTES >> 20} MiB", "")]
    slow = [set(one.ranks) for one in report.case.slow]
    shown = sorted(report.pairs, key=lambda pair: pair.bytes_per_s)[:MOST_PAIRS]
    for pair in shown if len(shown) < len(report.pairs) else report.pairs:
        names = [f"{rank} ({host[rank]})" if several else str(rank) for rank in pair.ranks]
        rows.append(
            (
                " - ".join(names),
                f"{pair.latency_s * 1e6:.0f} us",
                f"{pair.bytes_per_s / 1e9:.2f} GB/s",
                "slow" if any(one <= set(pair.ranks) for one in slow) else "",
            )
        )
    median = statistics.median(pair.bytes_per_s for pair in report.pairs) / 1e9
    hidden = len(report.pairs) - len(shown)
    lines = list(_table(rows))
    if hidden:
        lines.append(f"  and {hidden} faster pairs; the median of all is {median:.2f} GB/s")
    return lines


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        yield f"  {'  '.join(cells)}".rstrip()
