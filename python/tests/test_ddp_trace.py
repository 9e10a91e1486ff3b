# SPDX-License-Identifier: BSD-3-Clause
"""Traces and pictures of overlap reports and straggler reports.

The references: the test's own clock around each part of the step, a trace that is read back, and
clocks that the test shifts by a known time.
"""

from __future__ import annotations

import copy
import csv
import json
import pickle
import random
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_support import RankPool, check, check_equal, raises
from torch import nn

from apex.parallel import DistributedDataParallel, OverlappedOptimizer
from apex.parallel._clocks import clock_offset
from apex.parallel._timeline import Span
from apex.parallel._trace import Trace, rows_of
from apex.parallel.overlap_report import BucketOverlap, OverlapReport, trace_of
from apex.parallel.straggler_report import RankTimes, StragglerReport


def _model() -> DistributedDataParallel:
    layers = [nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4)]
    return DistributedDataParallel(nn.Sequential(*layers), message_size=100)


# --- pure parts ---


def test_rows_of_intervals_no_two_overlap_and_few_rows() -> None:
    generator = random.Random(3)
    for _ in range(200):
        begins = [generator.randint(0, 20) for _ in range(generator.randint(0, 12))]
        intervals = [(float(b), float(b + generator.randint(0, 9))) for b in begins]
        rows = rows_of(intervals)
        for i, (begin, end) in enumerate(intervals):
            for j in range(i):
                apart = end <= intervals[j][0] or intervals[j][1] <= begin
                assert rows[i] != rows[j] or apart, (intervals, rows)
        deepest = max(
            (sum(b <= at < max(e, b + 0.5) for b, e in intervals) for at, _ in intervals),
            default=0,
        )
        assert len(set(rows)) <= deepest, (intervals, rows)


@pytest.mark.parametrize("offset", [0.0, 1234.5, -3.25])
def test_clock_offset_other_clock_is_found_to_the_time_of_a_collective(offset: float) -> None:
    generator = random.Random(5)
    first, mine = [], []
    for number in range(16):
        entered = [number + generator.uniform(0, 0.2) for _ in range(2)]
        left = [max(entered) + generator.uniform(0.001, 0.01) for _ in range(2)]
        first.append((entered[0], left[0]))
        mine.append((entered[1] - offset, left[1] - offset))
    assert clock_offset(first, mine) == pytest.approx(offset, abs=0.1)
    # If both ranks arrive at once, the accuracy is the duration of the collective.
    both = [(float(n), n + 0.002) for n in range(4)]
    assert clock_offset(both, [(b - offset, e - offset) for b, e in both]) == pytest.approx(offset)


def _report(rank: int, began_s: float) -> OverlapReport:
    buckets = [
        BucketOverlap([1], ["b"], 4, 0.1, 0.2, 0.5, 0.45, 0.1),
        BucketOverlap([0], ["a"], 8, 0.3, 0.35, 0.6, 0.5, 0.2, shared_memory=True),
    ]
    return OverlapReport("host", rank, began_s, 0.4, 0.6, 0.4, 0.2, 0.2, 0.5, buckets, [], "")


def test_trace_of_two_ranks_is_on_one_clock() -> None:
    slices = [e for e in trace_of([_report(0, 100.0), _report(1, 100.25)]).events if e["ph"] == "X"]
    begins = {(e["pid"], e["name"]): e["ts"] for e in slices if e["tid"] != 1}
    assert begins[0, "backward"] == 0
    assert begins[1, "backward"] == pytest.approx(250_000)
    assert begins[1, "bucket 1"] == pytest.approx(550_000)
    waits = [(e["pid"], e["ts"], e["dur"]) for e in slices if e["tid"] == 1]
    assert waits[:2] == [(0, pytest.approx(450_000), pytest.approx(50_000))] + [
        (0, pytest.approx(500_000), pytest.approx(100_000))
    ]


def _check_nested(events: list[dict[str, Any]]) -> None:
    """Slices of a row must be disjoint or nested, or the viewers drop them."""
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in rows.values():
        open_until: list[float] = []
        for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= begin + 1e-3:
                open_until.pop()
            check(not open_until or end <= open_until[-1] + 1e-3, f"{begin} to {end} in {slices}")
            open_until.append(end)


def test_trace_save_is_the_format_that_viewers_read(tmp_path: Path) -> None:
    trace = Trace(5.0)
    trace.process(3, "rank 3", ["step", "waits"])
    trace.slice(3, 1, "wait", 5.5, 5.75, bytes=7)
    trace.save(tmp_path / "trace.json")
    read = json.loads((tmp_path / "trace.json").read_text())
    assert read["traceEvents"][-1] == {
        "ph": "X",
        "name": "wait",
        "pid": 3,
        "tid": 1,
        "ts": 500_000.0,
        "dur": 250_000.0,
        "args": {"bytes": 7},
    }
    names = [e["args"]["name"] for e in read["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["step", "waits"]


# --- of a job ---


def _traces(rank: int, world: int, folder: str) -> None:
    torch.manual_seed(rank)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.record_overlap()
    taken: list[tuple[float, float]] = []
    for step in range(3):
        if step == 2:
            model(torch.ones(2, 6))  # in the same step, before its own forward
        begin = time.perf_counter()
        loss = model(torch.full((5, 6), 1.0 + rank)).square().sum()
        middle = time.perf_counter()
        loss.backward()
        taken = [(begin, middle), (middle, time.perf_counter())]
        optimizer.step()
        optimizer.zero_grad()
    report = model.overlap_report()
    assert report is not None
    model(torch.ones(2, 6))  # the next step's forward
    check_equal(model.overlap_report(), report, "report after the next forward")
    names = [span.name for span in report.spans]
    check_equal(names, ["forward", "forward", "step (SGD)"], "spans")
    check_equal(report.rank, rank, "rank")
    (forward_began, forward_ended), (backward_began, backward_ended) = taken
    forward = report.spans[1]
    check(forward_began <= report.began_s + forward.begin_s, "forward began before")
    check(report.began_s + forward.end_s <= forward_ended, "forward ended after")
    check(backward_began <= report.began_s <= backward_ended, "backward began elsewhere")
    check(report.began_s + report.backward_s <= backward_ended, "backward ended after")
    check(report.spans[2].begin_s >= report.backward_s, "the step began before")
    check_equal(pickle.loads(pickle.dumps(report)), report, "pickled")

    report.save_trace(f"{folder}/alone{rank}.json")
    alone = json.loads(Path(f"{folder}/alone{rank}.json").read_text())["traceEvents"]
    check_equal({event["pid"] for event in alone}, {rank}, "processes")
    path = Path(folder) / "all.json"
    report.save_trace(path, group=dist.group.WORLD)
    dist.barrier()
    events = json.loads(path.read_text())["traceEvents"]
    _check_nested(events)
    check_equal({event["pid"] for event in events}, set(range(world)), "processes")
    check(all(event["ts"] >= 0 for event in events if event["ph"] == "X"), "a time before 0")
    begins = {e["pid"]: e["ts"] for e in events if e["ph"] == "X" and e["name"] == "backward"}
    ends = {e["pid"]: e["ts"] + e["dur"] for e in events if e.get("name") == "backward"}
    # On one clock, a rank's backward ends after all others have begun.
    check(max(begins.values()) <= min(ends.values()), f"{begins} and {ends}")
    buckets = [e["args"] for e in events if e["ph"] == "X" and "parameters" in e["args"]]
    check_equal(len(buckets), world * len(report.buckets), "buckets")

    report.plot(f"{folder}/all.png", group=dist.group.WORLD)
    report.plot(f"{folder}/alone{rank}.svg")
    dist.barrier()
    check(Path(f"{folder}/all.png").read_bytes()[:4] == b"\x89PNG", "no PNG")
    drawn = Path(f"{folder}/alone{rank}.svg").read_text()
    check(f"rank {rank}" in drawn or "<svg" in drawn, "no SVG")
    with raises(OSError, "nowhere"):
        report.save_trace("/nowhere/trace.json")

    numbers = report.as_dict()
    check_equal(numbers["overlap/backward_s"], report.backward_s, "backward_s")
    last = len(report.buckets) - 1
    check_equal(numbers[f"overlap/bucket{last}/exposed_s"], report.buckets[-1].exposed_s, "bucket")
    check(all(type(value) is float for value in numbers.values()), f"{numbers}")


@pytest.mark.processes
def test_trace_two_ranks_is_read_back(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ranks.run(2, _traces, str(tmp_path))


def _overlapped(rank: int, world: int, folder: str) -> None:
    model = _model()
    model.record_overlap()
    optimizer = OverlappedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.full((5, 6), 1.0 + rank)).square().sum().backward()
        optimizer.step()
    optimizer.synchronize()
    report = model.overlap_report()
    assert report is not None
    names = [span.name for span in report.spans]
    check_equal(names, ["forward", "step (OverlappedOptimizer)"], "spans")
    _check_nested(trace_of([report]).events)
    model.record_overlap(False)
    check_equal(model.overlap_report(), None, "report when it is off")


@pytest.mark.processes
def test_trace_overlapped_optimizer_rows_are_nested(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _overlapped, str(tmp_path))


def _whose(rank: int, world: int, folder: str) -> None:
    group = [dist.new_group([one]) for one in range(world)][rank]
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    model.record_overlap()
    other = torch.optim.Adam(nn.Linear(2, 2).parameters())
    copies = copy.deepcopy(model)
    for wrapper in (model, copies):
        of_it = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        for _ in range(3):
            of_it.zero_grad()
            wrapper(torch.ones(2, 4)).sum().backward()
            other.step()  # an optimizer of another model
            of_it.step()
            with torch.no_grad():
                wrapper(torch.ones(2, 4))  # evaluation
        names = [span.name for span in wrapper.overlap_report().spans]
        check_equal(names, ["forward", "step (SGD)"], "spans")
    report = model.overlap_report()
    check_equal(report.rank, 0, "rank in a group of its own")
    # With several groups, the row is the rank in the trace's group.
    report.save_trace(f"{folder}/trace.json", group=dist.group.WORLD)
    dist.barrier()
    events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    check_equal({event["pid"] for event in events}, set(range(world)), "processes")


@pytest.mark.processes
def test_trace_shows_its_own_optimizer_and_ranks_of_the_group(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, _whose, str(tmp_path))


def test_trace_spans_that_cross_have_rows_of_their_own() -> None:
    report = replace(_report(0, 1.0), spans=[Span("step (SGD)", -0.2, 0.1)])
    slices = [e for e in trace_of([report]).events if e["ph"] == "X"]
    _check_nested(slices)
    rows = {event["name"]: event["tid"] for event in slices}
    assert rows["step (SGD)"] != rows["backward"] == rows["gradients"]


# --- straggler reports ---


def _stragglers() -> StragglerReport:
    fast = RankTimes(0.01, 0.02, 0.006, 0.004, 0.5, 0.1, 0.001, None, "a")
    slow = RankTimes(0.02, 0.03, 0.006, 0.014, 2.0, 0.9, 0.01, "a", "b")
    return StragglerReport(20, [fast, slow], 1, "")


def test_straggler_report_plot_names_the_straggler(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        _stragglers().plot(tmp_path / "stragglers.svg")
    text = (tmp_path / "stragglers.svg").read_text()
    assert "rank 1 (straggler)" in text and "rank 0 (straggler)" not in text
    with pytest.raises(ValueError, match="nothing to plot"):
        StragglerReport(0, [], None, "").plot(tmp_path / "nothing.png")


def test_straggler_report_as_dict_is_rows_of_a_csv_file(tmp_path: Path) -> None:
    numbers = _stragglers().as_dict()
    with open(tmp_path / "log.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, numbers)
        writer.writeheader()
        writer.writerow(numbers)
    with open(tmp_path / "log.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["straggler/rank1/own_s"]) == 0.02
    assert float(row["straggler/rank0/last_share"]) == 0.1


def test_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for report in (_stragglers(), _report(0, 1.0)):
        with pytest.raises(ImportError, match="pip install matplotlib"):
            report.plot(tmp_path / "x.png")  # type: ignore[attr-defined]
