# SPDX-License-Identifier: BSD-3-Clause
"""The drawings of concepts.md; `python docs/figures/draw.py` writes them beside itself.

They lie on a light panel of their own, so that they can be read on a dark page as well. Needs
matplotlib.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FOLDER = Path(__file__).parent
PANEL, INK, SOFT = "#f6f7f9", "#1f2933", "#5b6673"
BLUE, ORANGE, GREEN, GREY = "#c7dcf5", "#fbd9b0", "#cbe8cf", "#dfe3e8"


def canvas(width: float, height: float) -> Axes:
    """Axes in units of a hundredth of an inch, y upwards, on the panel."""
    figure = plt.figure(figsize=(width / 100, height / 100), facecolor=PANEL)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return axes


def box(
    axes: Axes, x: float, y: float, w: float, h: float, label: str, fill: str, size: float = 10
) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x + 3, y + 3), w - 6, h - 6, boxstyle="round,pad=0,rounding_size=5",
            facecolor=fill, edgecolor=INK, linewidth=0.9,
        )
    )  # fmt: skip
    say(axes, x + w / 2, y + h / 2, label, size)


def say(
    axes: Axes, x: float, y: float, text: str, size: float = 10, colour: str = INK,
    align: str = "center", weight: str = "normal",
) -> None:  # fmt: skip
    axes.text(
        x, y, text, ha=align, va="center", fontsize=size, color=colour, fontweight=weight,
        linespacing=1.25,
    )  # fmt: skip


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, linewidth=1, color=SOFT,
            connectionstyle=f"arc3,rad={bend}", shrinkA=0, shrinkB=0,
        )
    )  # fmt: skip


def write(axes: Axes, name: str) -> None:
    axes.figure.savefig(FOLDER / name, facecolor=PANEL, metadata={"Date": None})
    plt.close(axes.figure)


def gradient() -> None:
    """Two processes and the all-reduces between them, over the time of a step."""
    axes = canvas(920, 410)
    say(axes, 20, 392, "One step of two processes", 12, align="left", weight="bold")
    layers = [("layer 4", 230), ("layer 3", 310), ("layer 2", 390), ("layer 1", 470)]
    for name, y in (("rank 0", 290), ("rank 1", 70)):
        say(axes, 20, y + 20, name, 10.5, align="left", weight="bold")
        box(axes, 90, y, 140, 40, "forward", GREY)
        for layer, x in layers:
            box(axes, x, y, 80, 40, f"backward\n{layer}", BLUE, 8.5)
        box(axes, 770, y, 120, 40, "optimizer step", GREY)
    for x, w, label in ((392, 150, "all-reduce, bucket 0"), (556, 150, "all-reduce, bucket 1")):
        box(axes, x, 176, w, 48, label, ORANGE, 8.8)
    say(axes, 20, 200, "between them", 10.5, align="left", weight="bold")
    for near, far in ((286, 226), (114, 174)):
        arrow(axes, (388, near), (402, far))
        arrow(axes, (548, near), (566, far))
        arrow(axes, (700, far), (770, near))
    notes = (
        (320, "1  bucket 0 is full:\nits all-reduce starts"),
        (474, "2  backward goes on\nmeanwhile"),
        (640, "3  only what is left then\nis waited for"),
        (832, "4  .grad holds\nthe average"),
    )
    for x, note in notes:
        say(axes, x, 354, note, 8.8, SOFT)
    arrow(axes, (90, 30), (890, 30))
    say(axes, 490, 17, "time", 9, SOFT)
    write(axes, "gradient.svg")


def bucket() -> None:
    """The states of a bucket, and what lies in its memory."""
    axes = canvas(920, 340)
    say(axes, 20, 320, "A bucket in one backward", 12, align="left", weight="bold")
    states = (
        ("empty", "backward begins;\nit waits for 3 gradients", GREY),
        ("filling", "each gradient is copied\nto its place: 3, 2, 1", BLUE),
        ("ready", "the last gradient is there;\nbuckets before it go first", BLUE),
        ("launched", "the all-reduce is in flight,\nwhile backward goes on", ORANGE),
        ("completed", "averages are in .grad;\nthe memory is kept", GREEN),
    )
    for place, (state, meaning, fill) in enumerate(states):
        x = 20 + 178 * place
        box(axes, x, 240, 150, 50, state, fill, 11)
        say(axes, x + 75, 212, meaning, 8.6, SOFT)
        if place:
            arrow(axes, (x - 26, 265), (x + 2, 265))
    arrow(axes, (790, 180), (95, 180), 0)
    axes.plot([807, 807], [196, 180], color=SOFT, linewidth=1)
    axes.plot([807, 790], [180, 180], color=SOFT, linewidth=1)
    axes.plot([95, 95], [180, 196], color=SOFT, linewidth=1)
    say(
        axes,
        450,
        168,
        "next backward: the same parameters, the same order on every rank",
        8.6,
        SOFT,
    )
    say(axes, 20, 128, "Its memory", 10.5, align="left", weight="bold")
    parts = (("3.bias", 90, BLUE), ("3.weight", 250, BLUE), ("2.bias", 90, BLUE))
    x = 130.0
    for label, width, fill in parts:
        box(axes, x, 105, width, 46, label, fill, 9.5)
        x += width
    box(axes, 600, 105, 140, 46, "in the report:\nwhich were used", GREY, 8.4)
    columns = (175, 345, 515, 670)
    rows = (
        ("rank 0", ("0.2", "1, 4, 2, 0, ...", "0.6", "1 1 1")),
        ("rank 1", ("0.4", "3, 0, 2, 2, ...", "0", "1 1 0")),
        ("result", ("0.3", "2, 2, 2, 1, ...", "0.3", "1 1 1")),
    )
    for place, (label, values) in enumerate(rows):
        y, weight = 76 - 27 * place, "bold" if label == "result" else "normal"
        say(axes, 20, y, label, 9, align="left", weight=weight)
        for x, value in zip(columns, values, strict=True):
            say(axes, x, y, value, 9, weight=weight)
    say(axes, 772, 62, "rank 1 did not use\n2.bias: it counts as 0", 8.4, SOFT, align="left")
    say(axes, 772, 22, "averages, and which\nsome rank has used", 8.4, SOFT, align="left")
    write(axes, "bucket.svg")


def ranks() -> None:
    """Two nodes of two processes, with every number that a process has."""
    axes = canvas(920, 330)
    for node in range(2):
        left = 20 + 450 * node
        axes.add_patch(
            FancyBboxPatch(
                (left, 20), 430, 290, boxstyle="round,pad=0,rounding_size=8",
                facecolor="#ffffff", edgecolor=SOFT, linewidth=1,
            )
        )  # fmt: skip
        title = f"node {node}" + (" (node rank 0): MASTER_ADDR" if node == 0 else " (node rank 1)")
        say(axes, left + 16, 290, title, 11, align="left", weight="bold")
        say(axes, left + 16, 268, "CUDA_VISIBLE_DEVICES=2,3", 9, SOFT, align="left")
        for local in range(2):
            x = left + 16 + 205 * local
            box(
                axes, x, 130, 195, 120,
                f"process\n\nRANK={2 * node + local}   WORLD_SIZE=4\n"
                f"LOCAL_RANK={local}\nLOCAL_WORLD_SIZE=2",
                BLUE, 9,
            )  # fmt: skip
            say(axes, x + 102, 106, f'torch.device("cuda", {local})', 8.6, SOFT)
            arrow(axes, (x + 97, 130), (x + 97, 117))
        for gpu in range(4):
            x = left + 16 + 102 * gpu
            used = gpu >= 2
            box(axes, x, 34, 96, 34, f"GPU {gpu}", GREEN if used else GREY, 9)
        # The visible devices are numbered from 0: local rank 0 is on GPU 2.
        arrow(axes, (left + 118, 96), (left + 268, 67))
        arrow(axes, (left + 320, 96), (left + 368, 67))
    write(axes, "ranks.svg")


if __name__ == "__main__":
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "apex", "font.family": "sans-serif"}
    )
    gradient()
    bucket()
    ranks()
