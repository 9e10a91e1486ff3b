# SPDX-License-Identifier: BSD-3-Clause
"""Inserts the tables of benchmarks/results/*.json into docs/performance.md.

    python benchmarks/report.py [--check]

It rewrites the page. With --check, it reports whether the page would change. The text between
`<!-- results: NAME -->` and `<!-- end -->` is replaced by the machine, the command and the tables
of NAME.json, and the plot NAME.png if it exists. NAME.json comes from ddp.py, sharded.py,
overlapped_optimizer.py, overhead.py, host_channel.py, sync_batch_norm.py or Google Benchmark.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import backend
import ddp
import harness
import host_channel
import instructions
import overhead
import overlapped_optimizer
import sharded
import sync_batch_norm

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
PLACE = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def describe(data: dict[str, Any]) -> str:
    machine = data["machine"]
    parts = [
        machine.get("gpu", ""),
        f"{machine['processor']}, {machine['cores']} cores",
        machine.get("cpu_capability", ""),
        f"torch {machine['torch']}",
        f"NCCL {machine['nccl']}" if machine.get("nccl") else "",
        f"{machine['threads_per_rank']} thread(s) a rank",
        f"commit {machine['commit']}" if machine["commit"] else "",
        machine["date"][:10],
    ]
    text = f"`{machine['command']}`: {', '.join(part for part in parts if part)}."
    if data["settings"].get("link"):
        text += f" Link: {data['settings']['link']}."
    if machine["load_at_start"] > 0.5 and "instructions" not in data:
        text += (
            f" **Provisional**: the load was {machine['load_at_start']:.1f} when it started, so "
            "something else was running."
        )
    return text


def google_benchmark(data: dict[str, Any]) -> str:
    """A table of Google Benchmark's output with --benchmark_repetitions and only aggregates."""
    context = data["context"]
    parts = [
        context.get("processor", ""),
        f"{context['num_cpus']} cores",
        f"torch {context['torch']}" if "torch" in context else "",
        f"commit {context['commit']}" if "commit" in context else "",
        context["date"][:10],
    ]
    text = f"`apex_benchmarks`: {', '.join(part for part in parts if part)}."
    if context["load_avg"][0] > 0.5:
        text += (
            f" **Provisional**: the load was {context['load_avg'][0]:.1f} when it started, so "
            "something else was running."
        )
    runs: dict[str, dict[str, dict[str, Any]]] = {}

    # interleaved runs are listed in random order
    def place(run: dict[str, Any]) -> tuple[int, int]:
        return run["family_index"], run["per_family_instance_index"]

    for run in sorted(data["benchmarks"], key=place):
        runs.setdefault(run["run_name"], {})[run["aggregate_name"]] = run
    rows = []
    for name, run in runs.items():
        median = run["median"]
        scale = {"ns": 1e-3, "us": 1.0, "ms": 1e3}[median["time_unit"]]
        bandwidth = median.get("bytes_per_second")
        rows.append(
            [
                name,
                f"{median['real_time'] * scale:.2f}",
                f"{100 * run['cv']['real_time']:.0f} %",
                f"{bandwidth / 1e9:.1f}" if bandwidth else "",
            ]
        )
    repetitions = next(iter(runs.values()))["median"]["repetitions"]
    head = ["benchmark", f"us (median of {repetitions})", "deviation", "GB/s"]
    return f"{text}\n\n{harness.table(head, rows)}\n"


def section(name: str) -> str:
    path = harness.RESULTS / f"{name}.json"
    if not path.exists():
        return ""
    data = json.loads(path.read_text())
    if "context" in data:
        return google_benchmark(data)
    if "instructions" in data:
        tables = instructions.report(data["instructions"])
    elif "results" in data and "steps" in data["settings"]:
        tables = "\n".join(overlapped_optimizer.report(result) for result in data["results"])
    elif "results" in data and "optimizers" in data["settings"]:
        tables = "\n".join(sharded.report(result) for result in data["results"])
    elif "backend" in data:
        tables = backend.report(data)
    elif "host" in data:
        tables = host_channel.report(data)
    elif "batch_norm" in data:
        tables = f"\n{sync_batch_norm.report(data['batch_norm'])}"
    elif "results" in data:
        tables = "\n".join(ddp.report(result) for result in data["results"])
    else:
        tables = overhead.report(data)
    plot = path.with_suffix(".png")
    picture = f"\n![{name}](../benchmarks/results/{plot.name})\n" if plot.exists() else ""
    return f"{describe(data)}\n{picture}{tables}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would change")
    check = parser.parse_args().check
    text = PAGE.read_text()
    names = [match[1] for match in PLACE.findall(text)]
    new = PLACE.sub(lambda m: f"{m[1]}\n{section(m[2])}\n{m[3]}", text)
    unused = {path.stem for path in harness.RESULTS.iterdir()} - set(names)
    if unused:
        print(f"{PAGE} has no place for {', '.join(sorted(unused))} of {harness.RESULTS}")
    if check:
        if new != text:
            print(f"{PAGE} is not what the results say: run python benchmarks/report.py")
        return int(new != text or bool(unused))
    PAGE.write_text(new)
    print(f"{PAGE}: {', '.join(names)}")
    return int(not names or bool(unused))


if __name__ == "__main__":
    sys.exit(main())
