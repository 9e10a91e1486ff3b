# SPDX-License-Identifier: BSD-3-Clause
"""Shared code for plots of reports. matplotlib is not a dependency of this package."""

from __future__ import annotations

from typing import Any

COMPUTES, PENDING, HIDDEN, EXPOSED = "#8da0cb", "#d9d9d9", "#66c2a5", "#e6553a"


def require() -> None:
    """Raise ImportError with the remedy if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"plot() needs matplotlib ({error}): pip install matplotlib") from error


def rows_figure(rows: int) -> tuple[Any, Any]:
    """A figure as high as its rows, and its axes. Not created by pyplot, which keeps figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 1.6 + 0.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def save(path: Any, figure: Any, axes: Any, labels: list[str], columns: int) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=columns, fontsize=8)
    figure.savefig(path, dpi=150)
