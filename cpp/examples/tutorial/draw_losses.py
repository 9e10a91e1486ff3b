# SPDX-License-Identifier: BSD-3-Clause
"""Draws the files of losses that the steps of the tutorial write, as an SVG picture.

python draw_losses.py one.csv two.csv three.csv --output=losses.svg
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN = 800, 450, 60
COLORS = ("#1f6fb4", "#d1495b", "#2e933c", "#8e5ea2", "#b8860b")


def read_losses(path: Path) -> list[float]:
    """The numbers of a file: a heading, then one a line."""
    try:
        heading, *rows = path.read_text().splitlines()
        losses = [float(row) for row in rows]
    except (OSError, ValueError) as error:
        sys.exit(f"draw_losses.py: cannot read losses from {path}: {error}")
    if heading != "loss" or not losses or not all(map(math.isfinite, losses)):
        sys.exit(f"draw_losses.py: {path} is not a file of losses that the tutorial has written")
    return losses


def draw(curves: dict[str, list[float]]) -> str:
    """One line for each curve, over the steps."""
    steps = max(len(losses) for losses in curves.values())
    highest = max(max(losses) for losses in curves.values()) or 1.0
    x_unit, y_unit = (WIDTH - 2 * MARGIN) / max(1, steps - 1), (HEIGHT - 2 * MARGIN) / highest

    def place(step: int, loss: float) -> str:
        return f"{MARGIN + step * x_unit:.1f},{HEIGHT - MARGIN - loss * y_unit:.1f}"

    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="14">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{MARGIN},{MARGIN} V{bottom} H{right}" fill="none" stroke="black"/>',
        f'<text x="{right}" y="{bottom + 25}" text-anchor="end">step {steps}</text>',
        f'<text x="{MARGIN}" y="{bottom + 25}">step 1</text>',
        f'<text x="{MARGIN - 5}" y="{MARGIN}" text-anchor="end">{highest:.2f}</text>',
        f'<text x="{MARGIN - 5}" y="{bottom}" text-anchor="end">0</text>',
    ]
    for number, (name, losses) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        points = " ".join(place(step, loss) for step, loss in enumerate(losses))
        lines += [
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>',
            f'<text x="{right}" y="{MARGIN + 20 * number}" fill="{color}" text-anchor="end">'
            f"{escape(name)}</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="CSV")
    parser.add_argument("--output", type=Path, default=Path("losses.svg"), metavar="SVG")
    args = parser.parse_args()
    args.output.write_text(draw({path.stem: read_losses(path) for path in args.files}))


if __name__ == "__main__":
    main()
