# SPDX-License-Identifier: BSD-3-Clause
"""When synchronized batch norm matters: accuracy against batch size per rank.

    python plot.py --ranks 4 --batches 2 4 8 16

Runs main.py with local and with synchronized statistics for each batch size,
prints a table, and draws accuracy.svg (without any plotting library).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent


def accuracy(norm: str, ranks: int, batch: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "result.json"
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             "--nproc-per-node", str(ranks), str(HERE / "main.py"), "--norm", norm,
             "--batch-per-rank", str(batch), "--steps", str(steps), "--output", str(output)],
            check=True,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads(output.read_text())["accuracy"]


def draw(batches: list[int], curves: dict[str, list[float]], path: pathlib.Path) -> None:
    """One polyline per curve; the vertical axis runs from 0 to 1."""
    width, height, left, top = 480, 280, 50, 20
    colours = {"local": "#c0392b", "sync": "#2471a3"}

    def point(index: int, value: float) -> str:
        x = left + index * width / max(1, len(batches) - 1)
        return f"{x:.1f},{top + height * (1 - value):.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 160}" height="{height + 70}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>',
    ]
    for tick in range(0, 11, 2):
        y = top + height * (1 - tick / 10)
        lines.append(f'<text x="{left - 30}" y="{y + 4:.1f}">{tick / 10:.1f}</text>')
    for index, batch in enumerate(batches):
        x = point(index, 0).split(",")[0]
        lines.append(f'<text x="{x}" y="{top + height + 18}" text-anchor="middle">{batch}</text>')
    lines.append(
        f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">'
        "images per rank and step</text>"
    )
    for row, (name, values) in enumerate(curves.items()):
        points = " ".join(point(i, v) for i, v in enumerate(values))
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="2"/>'
        )
        lines.append(
            f'<text x="{left + width + 10}" y="{top + 20 + 18 * row}" fill="{colours[name]}">'
            f"{name} batch norm</text>"
        )
    path.write_text("\n".join([*lines, "</svg>"]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "accuracy.svg")
    options = parser.parse_args()
    curves: dict[str, list[float]] = {"local": [], "sync": []}
    print("| images per rank | local | sync |\n|---|---|---|")
    for batch in options.batches:
        for norm, values in curves.items():
            values.append(accuracy(norm, options.ranks, batch, options.steps))
        print(f"| {batch} | {curves['local'][-1]:.3f} | {curves['sync'][-1]:.3f} |", flush=True)
    draw(options.batches, curves, options.output)


if __name__ == "__main__":
    main()
