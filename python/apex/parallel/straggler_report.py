# SPDX-License-Identifier: BSD-3-Clause
"""How long each process takes for its own part of a step, and which one delays the others."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from apex.parallel import _plots


@dataclass(frozen=True)
class RankTimes:
    """One process's own part of the steps.

    It lasts from the end of one synchronized backward until all buckets of the next one are
    launched, minus the time spent waiting in collectives of this package. Times are medians over
    the steps, in seconds.

    Attributes:
        own_s: the whole part.
        own_p95_s: its 95th percentile.
        before_backward_s: the share of ``own_s`` in the optimizer, the data, forward and the loss.
        backward_s: the share of ``own_s`` in backward.
        ratio: ``own_s`` divided by the median of the other ranks'.
        last_share: the fraction of steps in which no rank took longer.
        gap_s: the longest time between two gradients of a backward.
        gap_from, gap_to: the parameters between whose gradients this gap occurs most often. A None
            in ``gap_from`` means before the first gradient.
    """

    own_s: float
    own_p95_s: float
    before_backward_s: float
    backward_s: float
    ratio: float
    last_share: float
    gap_s: float
    gap_from: str | None
    gap_to: str | None


@dataclass(frozen=True)
class StragglerReport:
    """The straggler report of the last steps. Can be pickled. ``str()`` returns a table.

    Attributes:
        steps: the number of steps, at most 256.
        ranks: by rank of the process group.
        straggler: the rank that holds up the others, or None. Over at least ten steps, it takes 2 %
            longer than their median, and it is the last rank more often than by chance, by three
            standard deviations.
    """

    steps: int
    ranks: list[RankTimes]
    straggler: int | None
    text: str = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.text

    def as_dict(self) -> dict[str, float]:
        """The numbers under flat names, for CSV files and TensorBoard's ``add_scalar``."""
        names = ("own_s", "own_p95_s", "before_backward_s", "backward_s", "ratio", "last_share")
        return {
            f"straggler/rank{rank}/{name}": float(getattr(times, name))
            for rank, times in enumerate(self.ranks)
            for name in names
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the own time of each rank into a picture. Needs matplotlib.

        All ranks have the same report, so one of them can draw it.

        Raises:
            ImportError: without matplotlib.
            ValueError: without ranks, or if the suffix of ``path`` is not a format of matplotlib.
        """
        _plots.require()
        if not self.ranks:
            raise ValueError(
                "the straggler report has no steps yet, so there is nothing to plot: run training "
                "steps first."
            )
        figure, axes = _plots.rows_figure(len(self.ranks))
        rows = range(len(self.ranks))
        before = [times.before_backward_s * 1e3 for times in self.ranks]
        backward = [times.backward_s * 1e3 for times in self.ranks]
        color = [_plots.EXPOSED if rank == self.straggler else _plots.HIDDEN for rank in rows]
        axes.barh(rows, before, color=_plots.COMPUTES, label="before backward")
        axes.barh(rows, backward, left=before, color=color, label="backward")
        p95 = [times.own_p95_s * 1e3 for times in self.ranks]
        axes.scatter(p95, rows, color="black", marker="|", s=80, label="95th percentile")
        axes.set_xlabel(f"own time in ms, medians of {self.steps} steps")
        labels = [f"rank {rank}" + " (straggler)" * (rank == self.straggler) for rank in rows]
        _plots.save(path, figure, axes, labels, columns=3)
