"""When the buckets of a DistributedDataParallel were ready, sent and there."""

from __future__ import annotations

from apex import _core
from apex.parallel._ddp_engine import EngineOwner
from apex.parallel.overlap_report import BucketOverlap, OverlapReport


class OverlapTimes(EngineOwner):
    """The part of the wrapper that takes times."""

    _records_overlap: bool = False

    def _install_hooks(self, engine: _core.Reducer) -> None:
        super()._install_hooks(engine)
        if self._records_overlap:
            engine.record_overlap(True)

    def record_overlap(self, on: bool = True) -> None:
        """Takes the times of synchronized backwards from the next one on, for overlap_report().

        Each process decides for itself. Off, as at first, it costs nothing. On, a clock is read for
        each gradient and a few times for each bucket; on a GPU an event is recorded each time, and
        neither the host nor the stream of backward waits. Not while a CUDA graph is captured.
        Turning it off forgets the last report.

        Waits for what an :class:`OverlappedOptimizer` has left on its way.

        Raises:
            RuntimeError: while a backward is running.
        """
        self._engine.record_overlap(bool(on))
        self._records_overlap = bool(on)

    def overlap_report(self) -> OverlapReport | None:
        """What the last backward that :meth:`record_overlap` took the times of has hidden.

        ``print(model.overlap_report())`` shows a table with a row per bucket. None if no backward
        was recorded yet. With an :class:`OverlappedOptimizer` it is the last backward whose buckets
        were all waited for. On a GPU the host waits until that backward is through. Not thread
        safe.
        """
        report = self._engine.overlap_report()
        if report is None:
            return None
        buckets = [BucketOverlap(**bucket) for bucket in report.pop("buckets")]
        return OverlapReport(**report, buckets=buckets)
