# SPDX-License-Identifier: BSD-3-Clause
"""Counts the machine instructions of a step, for `overhead.py --instructions`.

It uses valgrind's callgrind. One process runs all wrappers under valgrind. Instructions are counted
only between begin() and end(), which a few lines of C implement. The code before them (importing
torch, building the modules, recording the order of gradients) runs almost at the speed of valgrind
alone. All threads count, and so does the Python code of the step. Needs valgrind with its headers
and a C compiler.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import numpy
import overhead

WARMUP, STEPS, REPEATS = 5, 4, 5
MARKERS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_ZERO_STATS; CALLGRIND_START_INSTRUMENTATION; }
void end(const char* name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


def missing() -> str | None:
    """The missing tool, if any."""
    for tool in ("valgrind", "cc"):
        if shutil.which(tool) is None:
            return f"'{tool}' is not on PATH"
    return None


def _build_markers(folder: str) -> str:
    library = f"{folder}/markers.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(command, input=MARKERS, text=True, check=True)
    return library


def _run_steps(library: str, numel: int, counts: list[int]) -> None:
    """Run under valgrind: one dump per wrapper, number of parameters and repetition."""
    markers = ctypes.CDLL(library)
    for wrapper in overhead.STEP_WRAPPERS:
        for count in counts:
            _, step = overhead._stepper(wrapper, count, numel, "cpu")
            for _ in range(WARMUP):
                step()
            for _ in range(REPEATS):
                markers.begin()
                for _ in range(STEPS):
                    step()
                markers.end(f"{wrapper} {count}".encode())


def _read_dumps(folder: str) -> dict[tuple[str, int], list[float]]:
    """Instructions per step, by wrapper and number of parameters."""
    numbers: dict[tuple[str, int], list[float]] = {}
    for path in sorted(Path(folder).glob("callgrind.out.*")):
        text = path.read_text(errors="replace")
        name = re.search(r"^desc: Trigger: Client Request: (\w+) (\d+)$", text, re.M)
        total = re.search(r"^totals: (\d+)", text, re.M)
        if name and total:
            numbers.setdefault((name[1], int(name[2])), []).append(int(total[1]) / STEPS)
    return numbers


def measure(numel: int = 64, counts: tuple[int, ...] = (20, 50, 100)) -> dict[str, Any]:
    """Instructions per step, each wrapper's overhead, and a linear fit of it over parameters."""
    # Valgrind does not support AVX-512.
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
                   "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "1",
                   "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(harness.free_port())}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind", "--tool=callgrind", "--instr-atstart=no",
            f"--callgrind-out-file={folder}/callgrind.out",
            sys.executable, __file__, _build_markers(folder), str(numel), *map(str, counts),
        ]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        numbers = _read_dumps(folder)
    if done.returncode or len(numbers) != len(overhead.STEP_WRAPPERS) * len(counts):
        raise RuntimeError(f"valgrind did not count every wrapper; it said:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = {"numel": numel, "counts": list(counts), "steps": {}, "line": {}}
    for wrapper in overhead.STEP_WRAPPERS:
        per_count = {count: harness.quartiles(numbers[wrapper, count]) for count in counts}
        result["steps"][wrapper] = {str(count): q for count, q in per_count.items()}
    for wrapper in overhead.STEP_WRAPPERS[1:]:
        added = [
            result["steps"][wrapper][str(count)]["median"]
            - result["steps"]["none"][str(count)]["median"]
            for count in counts
        ]
        slope, intercept = numpy.polyfit(counts, added, 1)
        result["line"][wrapper] = {"per_parameter": float(slope), "per_step": float(intercept)}
    return result


def report(result: dict[str, Any]) -> str:
    """A table in Markdown."""
    most = str(result["counts"][-1])
    rows = [
        [
            overhead.WRAPPERS[wrapper][0],
            f"{line['per_step'] / 1e3:.1f}",
            f"{line['per_parameter'] / 1e3:.2f}",
            harness.show(result["steps"][wrapper][most], 1e-3, 1),
        ]
        for wrapper, line in result["line"].items()
    ]
    rows.insert(0, ["no DDP", "", "", harness.show(result["steps"]["none"][most], 1e-3, 1)])
    head = ["thousands of instructions", "added a step", "added a parameter"]
    head.append(f"whole step, {most} parameters (quartiles)")
    title = f"Instructions of a step, parameters of {result['numel']} elements"
    return f"\n### {title}\n\n{harness.table(head, rows)}"


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("instructions.py: overhead.py --instructions starts this script, under Valgrind.")
    markers_library, elements, *parameters = sys.argv[1:]
    harness.run(
        _run_steps, 1, "gloo", "cpu", (markers_library, int(elements), [*map(int, parameters)])
    )
