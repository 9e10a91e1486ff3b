# SPDX-License-Identifier: BSD-3-Clause
"""Proposes buckets from the times of a recorded backward.

    python -m apex.parallel.propose_plan report.json > plan.json

``report.json`` holds what :meth:`DistributedDataParallel.overlap_report` returned, and
``plan.json`` what :meth:`DistributedDataParallel.load_bucket_plan` takes::

    model = DistributedDataParallel(module, message_size=1)   # a bucket for each parameter
    model.record_overlap()
    ...                                                       # some steps
    json.dump(dataclasses.asdict(model.overlap_report()), open("report.json", "w"))

Buckets of the report are merged, never split, so record small ones. Take the report of the slowest
process, and of a backward after the third: the first ones allocate. Parameters have to be of one
dtype and device: a bucket holds no others.

The model: a bucket can be sent when its last gradient is there and the bucket before it has
arrived; it takes ``latency + bytes / rate``, both fitted to the report. Over all ways to cut the
launch order into runs, dynamic programming finds the one whose last bucket arrives first:
``end(j) = min over i < j of max(end(i), ready(j)) + cost(i..j)``, which is optimal since a run can
only gain if the ones before it end earlier. (S. Shi, X. Chu, B. Li, "MG-WFBP: Efficient Data
Communication for Distributed Synchronous SGD Algorithms", INFOCOM 2019, section IV, which merges
greedily under the same model.) A proposal, to be measured against the default: on the links of
docs/performance.md none was faster beyond the spread.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from apex.parallel.overlap_report import OverlapReport


class Cost(NamedTuple):
    """Of sending one bucket."""

    latency_s: float
    seconds_per_byte: float

    def of(self, size: int) -> float:
        return self.latency_s + size * self.seconds_per_byte


def fit_cost(buckets: Sequence[Mapping[str, Any]]) -> Cost:
    """The cost under which the buckets of a report would have taken as long as they did.

    Least squares over the time from when a bucket could start to its arrival; neither part is
    negative.
    """
    sizes, times, free = [], [], 0.0
    for bucket in buckets:
        sizes.append(float(bucket["bytes"]))
        times.append(max(0.0, bucket["arrived_s"] - max(free, bucket["launched_s"])))
        free = max(free, bucket["arrived_s"])
    count = len(sizes)
    mean_size, mean_time = sum(sizes) / count, sum(times) / count
    spread = sum((size - mean_size) ** 2 for size in sizes)
    both = sum((s - mean_size) * (t - mean_time) for s, t in zip(sizes, times, strict=True))
    slope = both / spread if spread > 0 else 0.0
    if slope <= 0:
        return Cost(mean_time, 0.0)
    latency = mean_time - slope * mean_size
    if latency < 0:
        return Cost(0.0, sum(times) / sum(sizes))
    return Cost(latency, slope)


def merge(ready_s: Sequence[float], sizes: Sequence[int], cost: Cost) -> list[int]:
    """Where the best runs end, exclusive: ``[2, 5]`` are the runs 0..1 and 2..4.

    Args:
        ready_s: when each piece is ready, in launch order; taken as not decreasing.
        sizes: bytes of each.
    """
    ends, cuts, ready = [0.0], [0], 0.0
    for j in range(1, len(sizes) + 1):
        ready = max(ready, ready_s[j - 1])
        best, cut, size = float("inf"), 0, 0
        for i in range(j - 1, -1, -1):
            size += sizes[i]
            end = max(ends[i], ready) + cost.of(size)
            if end < best:
                best, cut = end, i
        ends.append(best)
        cuts.append(cut)
    result, at = [], len(sizes)
    while at > 0:
        result.append(at)
        at = cuts[at]
    return result[::-1]


def propose_plan(report: OverlapReport | Mapping[str, Any]) -> list[list[str]]:
    """The names of the parameters in each bucket, in launch order.

    Args:
        report: an :class:`OverlapReport`, or the dictionary of one.

    Raises:
        ValueError: for a report without buckets, or whose clock says nothing about the network.
    """
    fields = asdict(report) if isinstance(report, OverlapReport) else report
    buckets = [bucket for bucket in fields["buckets"] if bucket["names"]]
    if not buckets:
        raise ValueError("the report has no buckets with parameters: record a backward first.")
    if fields["clock"] == "host only":
        raise ValueError(
            'the report\'s clock is "host only": it has the times at which the host asked for '
            "things, which say nothing about when they were done."
        )
    runs = merge(
        [bucket["ready_s"] for bucket in buckets],
        [bucket["bytes"] for bucket in buckets],
        fit_cost(buckets),
    )
    begins = [0, *runs[:-1]]
    return [
        [name for bucket in buckets[begin:end] for name in bucket["names"]]
        for begin, end in zip(begins, runs, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m apex.parallel.propose_plan",
        description="Proposes buckets from the times of a recorded backward.",
    )
    parser.add_argument("report", help="JSON of an OverlapReport; - for standard input")
    options = parser.parse_args(arguments)
    try:
        if options.report == "-":
            report = json.load(sys.stdin)
        else:
            with open(options.report, encoding="utf-8") as file:
                report = json.load(file)
        plan = propose_plan(report)
    except OSError as error:
        parser.exit(2, f"{parser.prog}: cannot read {options.report}: {error.strerror}.\n")
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {options.report}: {error}\n")
    except (KeyError, TypeError):
        parser.exit(2, f"{parser.prog}: {options.report} is not what overlap_report() returns.\n")
    json.dump(plan, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
