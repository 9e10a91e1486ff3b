# SPDX-License-Identifier: BSD-3-Clause
"""Draws a sweep of bucket sizes by ddp.py: step time and overlap. Called by plot.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SWEPT = {"torch": ("#4878a8", "o"), "apex": ("#c8553d", "s")}
FIXED = {
    "torch": ("#4878a8", "--", "torch, default"),
    "apex": ("#c8553d", "--", "apex, default"),
    "flat": ("#c2a14d", ":", "backward, then one all-reduce"),
}


def _curve(result: dict[str, Any], library: str, key: str, scale: float) -> tuple[list, ...]:
    points = []
    for name, entry in result["variants"].items():
        base, _, size = name.partition("@")
        if base == library and size:
            quartile = entry[key]
            points.append(
                (float(size), *(quartile[part] * scale for part in ("median", "q1", "q3")))
            )
    points.sort()
    return tuple(map(list, zip(*points, strict=True))) if points else ([], [], [], [])


def _panel(axes: Any, result: dict[str, Any], key: str, scale: float) -> None:
    for library, (color, marker) in SWEPT.items():
        sizes, medians, low, high = _curve(result, library, key, scale)
        below = [m - value for m, value in zip(medians, low, strict=True)]
        above = [value - m for m, value in zip(medians, high, strict=True)]
        # Slightly apart, so that the error bars do not hide each other.
        sizes = [size * (0.97 if library == "torch" else 1.03) for size in sizes]
        axes.errorbar(
            sizes, medians, yerr=[below, above], color=color, marker=marker, markersize=5,
            lw=1.5, capsize=3, label=f"{library}, bucket_cap_mb as on the axis",
        )  # fmt: skip
    for name, (color, style, label) in FIXED.items():
        if name in result["variants"]:
            height = result["variants"][name][key]["median"] * scale
            axes.axhline(height, color=color, ls=style, lw=1.3, label=label)
    if "best" in result:
        axes.axhline(
            result["best"][key]["median"] * scale, color="#5a9a5a", lw=1.3,
            label="forward + max(backward, all-reduce)",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    sizes = sorted({float(n.partition("@")[2]) for n in result["variants"] if "@" in n})
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes], fontsize=8)
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    axes.set_xlabel("bucket_cap_mb, MiB", fontsize=8)
    axes.grid(axis="y", color="#e4e4e4", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw(data: dict[str, Any], caption: str, target: Path) -> None:
    """Draw a row per model over the bucket size: step time on the left, overlap on the right."""
    from matplotlib import pyplot

    results = data["results"]
    figure, panels = pyplot.subplots(
        len(results), 2, figsize=(9.6, 3.4 * len(results) + 1.2), squeeze=False
    )
    for row, result in zip(panels, results, strict=True):
        _panel(row[0], result, "seconds", 1e3)
        _panel(row[1], result, "overlap", 1.0)
        row[0].set_ylabel("step, ms", fontsize=8)
        row[1].set_ylabel("overlap (1: the shorter part is hidden)", fontsize=8)
        title = f"{result['title']} ({result['megabytes']:g} MB), {result['rounds']} rounds"
        row[0].set_title(title, fontsize=9, loc="left")
    link = data["settings"].get("link")
    if link:
        figure.suptitle(f"Two ranks, link of {link}", fontsize=10, x=0.01, ha="left")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    bottom = 0.85 / figure.get_figheight()
    figure.legend(
        handles, labels, loc="lower center", ncols=3, fontsize=8, frameon=False,
        bbox_to_anchor=(0.5, 0.2 / figure.get_figheight()),
    )  # fmt: skip
    figure.text(0.01, 0.006, caption, fontsize=6.5, color="#555555")
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(target, dpi=130)
    pyplot.close(figure)
