# SPDX-License-Identifier: BSD-3-Clause
"""Reports how much communication of a backward was hidden behind computation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from apex._internal.objects import all_gather_object
from apex.parallel import _plots
from apex.parallel._clocks import offset_to_first_rank
from apex.parallel._timeline import Span
from apex.parallel._trace import Trace, rows_of


@dataclass(frozen=True)
class BucketOverlap:
    """The timeline of one bucket, in seconds since backward began.

    ``ready_s <= launched_s <= arrived_s``.

    Attributes:
        parameters: indices of its parameters in ``module.parameters()``.
        names: names of these parameters.
        bytes: the size that this process passed to the process group or the communication hook.
        ready_s: when its last gradient was computed; ``launched_s`` if this process missed one.
        launched_s: when it was packed and passed to the process group.
        arrived_s: when its sum was complete. It is in flight from ``launched_s`` to ``arrived_s``,
            which includes waiting for the last process to send its part.
        awaited_s: when the first wait for it began, before or after it arrived.
        exposed_s: the part of the time in flight that was not hidden.
        shared_memory: whether it was summed in memory shared by the processes, all on one host.
        by_host: whether it was summed in each host's shared memory first, and then between hosts.
            If neither is true, the process group summed it.
    """

    parameters: list[int]
    names: list[str]
    bytes: int
    ready_s: float
    launched_s: float
    arrived_s: float
    awaited_s: float
    exposed_s: float
    shared_memory: bool = False
    by_host: bool = False


@dataclass(frozen=True)
class OverlapReport:
    """The timeline of one synchronized backward of this process. Can be pickled.

    ``str()`` returns a table.

    Attributes:
        clock: ``"host"``: gradients are on the CPU. ``"device"``: times are those of the device's
            streams. ``"host only"``: gradients are on several devices, or on one without timed
            events. The times are then those of the host's launches, and say little.
        rank: the rank of this process in the wrapper's group.
        began_s: when backward began, by ``time.perf_counter()``, which the processes of a host
            share; with ``"device"``, on the device's stream.
        last_gradient_s: from the beginning of backward until its last gradient was computed.
        backward_s: until gradients were complete; with :class:`OverlappedOptimizer`, until
            ``backward()`` returned.
        communication_s: time in which at least one bucket was in flight.
        exposed_s: the part of ``communication_s`` that was not hidden: between ``last_gradient_s``
            and ``backward_s``, or, after that, while a module of the next forward waited for a
            bucket.
        hidden_s: the other part, in which gradients or the next forward were computed.
        hidden_fraction: ``hidden_s / communication_s``; 1 if nothing was in flight.
        buckets: in launch order.
        spans: when the host ran ``"forward"`` and ``"step (SGD)"`` (of optimizers that hold
            parameters of the wrapper) since the previous optimizer step. Times are relative to the
            beginning of backward, as above.
    """

    clock: str
    rank: int
    began_s: float
    last_gradient_s: float
    backward_s: float
    communication_s: float
    exposed_s: float
    hidden_s: float
    hidden_fraction: float
    buckets: list[BucketOverlap]
    spans: list[Span]
    text: str = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    def as_dict(self) -> dict[str, float]:
        """The numbers under flat names, for CSV files and TensorBoard's ``add_scalar``."""
        names = ("last_gradient_s", "backward_s", "communication_s", "exposed_s", "hidden_s")
        numbers = {f"overlap/{name}": float(getattr(self, name)) for name in names}
        numbers["overlap/hidden_fraction"] = self.hidden_fraction
        for index, bucket in enumerate(self.buckets):
            numbers[f"overlap/bucket{index}/in_flight_s"] = bucket.arrived_s - bucket.launched_s
            numbers[f"overlap/bucket{index}/exposed_s"] = bucket.exposed_s
        return numbers

    def save_trace(
        self, path: str | os.PathLike[str], group: dist.ProcessGroup | None = None
    ) -> None:
        """Write the step as a trace for https://ui.perfetto.dev and chrome://tracing.

        The trace contains forward, backward, optimizer steps, the buckets (ready, in flight) and
        the waits for them. Without ``group`` it covers this process only, and does not communicate.
        With ``group``, every process of the group must call this with its own report. The first
        process writes the file, with a row per rank. Collectives align the clocks of different
        hosts, to half the duration of one collective.

        Raises:
            OSError: if the file cannot be written.
        """
        reports = self._gathered(group)
        if reports:
            trace_of(reports).save(path)

    def plot(self, path: str | os.PathLike[str], group: dist.ProcessGroup | None = None) -> None:
        """Draw the data of :meth:`save_trace` into a picture. Needs matplotlib.

        Raises:
            ImportError: without matplotlib, before any communication.
            ValueError: if the suffix of ``path`` is not a format of matplotlib.
        """
        _plots.require()
        reports = self._gathered(group)
        if reports:
            _draw(path, reports)

    def _gathered(self, group: dist.ProcessGroup | None) -> list[OverlapReport]:
        """The reports of all ranks on the first rank, with its clock; an empty list elsewhere."""
        if group is None:
            return [self]
        began_s = self.began_s + offset_to_first_rank(group)
        mine = replace(self, rank=dist.get_rank(group), began_s=began_s)
        reports: list[OverlapReport] = all_gather_object(mine, group)
        return reports if dist.get_rank(group) == 0 else []


def _begin_of(reports: Sequence[OverlapReport]) -> float:
    return min(r.began_s + min([0.0, *(span.begin_s for span in r.spans)]) for r in reports)


def trace_of(reports: Sequence[OverlapReport]) -> Trace:
    """A trace with a process per report, and rows for computation, waits and buckets."""
    trace = Trace(_begin_of(reports))
    for report in reports:
        _add(trace, report)
    return trace


def _add(trace: Trace, report: OverlapReport) -> None:
    buckets = report.buckets
    # Steps may run in other threads, and inside forwards.
    spans = [*report.spans, Span("backward", 0, report.backward_s)]
    row_of_span = rows_of([(span.begin_s, span.end_s) for span in spans])
    row_of_bucket = rows_of([(bucket.ready_s, bucket.arrived_s) for bucket in buckets])
    waits = max(row_of_span) + 1
    rows = ["step", *(f"step {row}" for row in range(1, waits)), "waits"]
    bucket_rows = [f"buckets {row}" for row in range(max(row_of_bucket, default=-1) + 1)]
    trace.process(report.rank, f"rank {report.rank}", [*rows, *bucket_rows])

    def add(row: int, name: str, begin_s: float, end_s: float, **about: object) -> None:
        trace.slice(
            report.rank, row, name, report.began_s + begin_s, report.began_s + end_s, **about
        )

    for span, row in zip(spans, row_of_span, strict=True):
        add(row, span.name, span.begin_s, span.end_s)
    add(row_of_span[-1], "gradients", 0, report.last_gradient_s, clock=report.clock)
    waited_s = 0.0  # on a device, a wait may begin before the previous one ends
    for number, (bucket, place) in enumerate(zip(buckets, row_of_bucket, strict=True)):
        row, name = waits + 1 + place, f"bucket {number}"
        add(
            row,
            name,
            bucket.ready_s,
            bucket.arrived_s,
            parameters=bucket.names,
            bytes=bucket.bytes,
            exposed_ms=bucket.exposed_s * 1e3,
            shared_memory=bucket.shared_memory,
            by_host=bucket.by_host,
        )
        add(row, "ready", bucket.ready_s, bucket.launched_s)
        add(row, "in flight", bucket.launched_s, bucket.arrived_s)
        begin_s = max(bucket.awaited_s, waited_s)
        if begin_s < bucket.arrived_s:
            add(waits, name, begin_s, bucket.arrived_s)
            waited_s = bucket.arrived_s


def _draw(path: str | os.PathLike[str], reports: Sequence[OverlapReport]) -> None:
    """Draw a row for the computation of each rank, and a row per bucket."""
    zero_s = _begin_of(reports)
    figure, axes = _plots.rows_figure(sum(1 + len(report.buckets) for report in reports))
    labels: list[str] = []

    def bar(report: OverlapReport, begin_s: float, end_s: float, color: str) -> None:
        left_s = report.began_s - zero_s + begin_s
        axes.barh(len(labels) - 1, (end_s - begin_s) * 1e3, left=left_s * 1e3, color=color)

    for report in reports:
        labels.append(f"rank {report.rank}")
        for span in [*report.spans, Span("backward", 0.0, report.last_gradient_s)]:
            bar(report, span.begin_s, span.end_s, _plots.COMPUTES)
            middle_s = report.began_s - zero_s + (span.begin_s + span.end_s) / 2
            axes.text(middle_s * 1e3, len(labels) - 1, span.name, ha="center", va="center", size=7)
        for number, bucket in enumerate(report.buckets):
            labels.append(f"bucket {number}")
            exposed_from = max(bucket.launched_s, bucket.arrived_s - bucket.exposed_s)
            bar(report, bucket.ready_s, bucket.launched_s, _plots.PENDING)
            bar(report, bucket.launched_s, exposed_from, _plots.HIDDEN)
            bar(report, exposed_from, bucket.arrived_s, _plots.EXPOSED)
    axes.set_xlabel("ms")
    for color, label in [
        (_plots.COMPUTES, "computation"),
        (_plots.PENDING, "ready, not launched"),
        (_plots.HIDDEN, "in flight, hidden"),
        (_plots.EXPOSED, "in flight, exposed"),
    ]:
        axes.barh(0, 0, color=color, label=label)
    _plots.save(path, figure, axes, labels, columns=4)
