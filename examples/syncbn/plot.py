# SPDX-License-Identifier: BSD-3-Clause
"""Shows when synchronized batch norm matters: accuracy against batch size per rank.

    python plot.py --ranks 4 --batches 2 4 8 16

Runs main.py with local and with synchronized statistics for each batch size, prints a table and
draws it into accuracy.png.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
import example_support as support

HERE = Path(__file__).resolve().parent
COLORS = {"local": "#c8553d", "sync": "#4878a8"}


def accuracy(norm: str, ranks: int, batch: int, steps: int) -> float:
    """Train on this number of ranks. Returns the fraction of correctly classified test images."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, "-m", "apex.parallel.multiproc", "--nproc", str(ranks),
             "--log-dir", folder, str(HERE / "main.py"), "--norm", norm,
             "--batch-per-rank", str(batch), "--steps", str(steps), "--output", str(output)],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode != 0:
            support.fail(f"main.py failed with {norm} batch norm and {batch} images per rank.")
        return json.loads(output.read_text())["accuracy"]


def draw(batches: list[int], curves: dict[str, list[float]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for name, values in curves.items():
        axes.plot(batches, values, marker="o", color=COLORS[name], label=f"{name} batch norm")
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_xlabel("images per rank and step")
    axes.set_ylabel("test accuracy")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(axis="y", color="#e4e4e4", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format=path.suffix[1:])
    support.write_file(path, drawn.getbuffer(), "the plot ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=support.positive_int, default=4, metavar="N", help="processes"
    )
    parser.add_argument(
        "--batches",
        type=support.positive_int,
        nargs="+",
        default=[2, 4, 16],
        metavar="N",
        help="images per rank and step",
    )
    parser.add_argument(
        "--steps", type=support.positive_int, default=60, metavar="N", help="of each training"
    )
    parser.add_argument(
        "--output",
        type=support.output_file,
        default=HERE / "accuracy.png",
        metavar="FILE",
        help="the plot, in a format that its suffix names",
    )
    options = parser.parse_args()
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        support.fail("the plot is drawn by matplotlib: run `pip install matplotlib`.")
    formats = FigureCanvasBase.get_supported_filetypes()
    if options.output.suffix[1:] not in formats:
        parser.error(f"--output {options.output} must end in one of .{', .'.join(formats)}")
    curves: dict[str, list[float]] = {"local": [], "sync": []}
    print("| images per rank | local | sync |\n|---|---|---|", flush=True)
    bar = support.progress(options.batches, "batch sizes", rank=0, unit="size")
    for batch in bar:
        for norm, values in curves.items():
            values.append(accuracy(norm, options.ranks, batch, options.steps))
        row = f"| {batch} | {curves['local'][-1]:.3f} | {curves['sync'][-1]:.3f} |"
        bar.write(row, file=sys.stdout)
    title = f"Handwritten digits, {options.ranks} ranks, {options.steps} steps"
    draw(options.batches, curves, title, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    support.run(main)
