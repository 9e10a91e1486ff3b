# SPDX-License-Identifier: BSD-3-Clause
"""Draws the results of ddp.py, overlapped_optimizer.py, sharded.py or host_channel.py.

`python benchmarks/plot.py results/ddp.json` writes results/ddp.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import plot_buckets

COLORS = {
    "none": "#8a8a8a",
    "forward": "#8a8a8a",
    "comm": "#8a8a8a",
    "flat": "#c2a14d",
    "torch": "#4878a8",
    "apex": "#c8553d",
    "overlapped": "#7b3294",
    "bound": "#5a9a5a",
}


def _color(variant: str) -> str:
    return COLORS[variant.split("@")[0].split("_")[0]]


def _title(variant: str, titles: dict[str, str]) -> str:
    base, _, size = variant.partition("@")
    return titles[base] + (f", {size} MiB" if size else "")


def _caption(data: dict[str, Any]) -> str:
    machine, settings = data["machine"], data["settings"]
    device = machine.get("gpu") if settings["device"] == "cuda" else machine["processor"]
    text = (
        f"{settings['ranks']} rank(s), {settings['backend']}, {device}, {machine['cores']} cores, "
        f"torch {machine['torch']}, {machine['date'][:10]}"
    )
    # otherwise it is in the figure's title
    if settings.get("link") and not settings.get("bucket_mb"):
        text += f", link of {settings['link'].partition(',')[0]}"
    return text + ("  (PROVISIONAL: machine was busy)" if machine["load_at_start"] > 0.5 else "")


def draw(path: Path) -> Path:
    """Draw one panel per model and one bar per variant: median ratio to torch's default, quartiles.

    A sweep of bucket sizes is drawn over the bucket size instead.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = json.loads(Path(path).read_text())
    target = Path(path).with_suffix(".png")
    if "host" in data:
        import host_channel

        host_channel.draw(data, target)
        return target
    if data["settings"].get("bucket_mb"):
        plot_buckets.draw(data, _caption(data), target)
        return target
    results = [r for r in data["results"] if all("ratio" in v for v in r["variants"].values())]
    count = max(len(result["variants"]) for result in data["results"])
    figure, panels = pyplot.subplots(
        len(results), 1, figsize=(8, (0.9 + 0.28 * count) * len(results) + 0.6), squeeze=False
    )
    for panel, result in zip(panels[:, 0], results, strict=True):
        variants = result["variants"]
        names = list(variants)[::-1]
        medians = [variants[name]["ratio"]["median"] for name in names]
        spread = [
            [abs(variants[n]["ratio"]["median"] - variants[n]["ratio"][key]) for n in names]
            for key in ("q1", "q3")
        ]
        panel.barh(
            range(len(names)),
            medians,
            xerr=spread,
            color=[_color(name) for name in names],
            error_kw={"lw": 1, "capsize": 2, "ecolor": "#333333"},
        )
        panel.set_yticks(range(len(names)), [_title(n, data["titles"]) for n in names], fontsize=8)
        panel.axvline(1.0, color="#333333", lw=0.8, ls="--")
        right = max(variants[name]["ratio"]["q3"] for name in names)
        panel.tick_params(axis="x", labelsize=8)
        panel.set_xlim(0, right * 1.15)
        for row, name in enumerate(names):
            text = f"{variants[name]['ratio']['median']:.2f}"
            panel.text(
                variants[name]["ratio"]["q3"] + 0.012 * right, row, text, va="center", fontsize=8
            )
        panel.spines[["top", "right"]].set_visible(False)
        reference = result.get("base", "torch")
        base = variants[reference]["seconds"]["median"]
        panel.set_title(
            f"{result['title']} ({result['megabytes']:g} MB); "
            f"{data['titles'][reference]}: {base * 1e3:.1f} ms a step",
            fontsize=9, loc="left",
        )  # fmt: skip
    reference = results[0].get("base", "torch")
    name = "torch's default" if reference == "torch" else data["titles"][reference]
    panels[-1, 0].set_xlabel(f"step time / {name} (median of rounds, quartiles)", fontsize=8)
    figure.text(0.01, 0.004, _caption(data), fontsize=6.5, color="#555555")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(target, dpi=130)
    pyplot.close(figure)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE.json")
    for path in parser.parse_args().results:
        if not path.is_file():
            parser.error(f"there is no file {path}")
        print(draw(path))
