# SPDX-License-Identifier: BSD-3-Clause
"""Writes trace events, which Perfetto and chrome://tracing display.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Trace:
    """Time slices in the rows of processes. Times are in seconds since ``zero_s``."""

    def __init__(self, zero_s: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._zero_s = zero_s

    def process(self, number: int, name: str, rows: Sequence[str]) -> None:
        """Set the name of a process and its rows, in display order."""
        for what, row, args in [
            ("process_name", 0, {"name": name}),
            ("process_sort_index", 0, {"sort_index": number}),
            *(("thread_name", row, {"name": of_row}) for row, of_row in enumerate(rows)),
            *(("thread_sort_index", row, {"sort_index": row}) for row in range(len(rows))),
        ]:
            self.events.append({"ph": "M", "name": what, "pid": number, "tid": row, "args": args})

    def slice(
        self, process: int, row: int, name: str, begin_s: float, end_s: float, **about: Any
    ) -> None:
        """Add a slice. Two slices of a row must be disjoint or nested."""
        self.events.append(
            {
                "ph": "X",
                "name": name,
                "pid": process,
                "tid": row,
                "ts": (begin_s - self._zero_s) * 1e6,
                "dur": max(0.0, end_s - begin_s) * 1e6,
                "args": about,
            }
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}))


def rows_of(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """For each interval, the first row in which it overlaps no interval that began before it.
    Pure."""
    ends: list[float] = []
    chosen = [0] * len(intervals)
    for index in sorted(range(len(intervals)), key=lambda i: intervals[i]):
        begin, end = intervals[index]
        free = [row for row, last in enumerate(ends) if last <= begin]
        row = free[0] if free else len(ends)
        ends[row : row + 1] = [end]
        chosen[index] = row
    return chosen
