# SPDX-License-Identifier: BSD-3-Clause
"""Stores the results of scripts/matrix.sh and writes docs/compatibility.md from them.

A result is one line of JSON. If a row has several results, the last one counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import test_summary

ROOT = Path(__file__).resolve().parents[1]

HEAD = """\
# Versions of torch, Python and compilers

`bash scripts/matrix.sh` builds the package, runs its tests and writes this page. A row holds for
the versions and the commit that it names, and for nothing else.

- *quick*: the C++ unit tests and the Python tests of `scripts/test.sh --quick`. *python*: the
  latter alone. *full*: all of `scripts/test.sh`.
- *cuda*: nvcc compiles the CUDA library for each architecture that it is shipped for, with
  warnings as errors; it is linked, and the tests of the package load it. No GPU runs it.
- The commit is the last one that changed what is built or tested.
- A skipped test needs something that was not there, for instance a GPU, or says nothing in a
  setting that its parameters make.
- A CUDA wheel on a machine without a GPU is tested over Gloo, on the CPU.
"""


def commit() -> str:
    """The last commit that changed the built or tested sources. Documentation does not count."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
        return run.stdout.strip()

    built = ["CMakeLists.txt", "pyproject.toml", "cmake", "cpp", "python"]
    changed = git("status", "--porcelain", "--", *built)
    last = git("log", "-1", "--format=%h", "--", *built)
    return (last or "unknown") + ("-dirty" if changed else "")


def print_commit(args: argparse.Namespace) -> int:
    print(commit())
    return 0


def load(file: Path) -> dict[str, dict[str, Any]]:
    """The last result of each row and kind of test run, by ``row tests``."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines() if line]
    return {f"{line['row']} {line['tests']}": line for line in lines}


def outcome(result: dict[str, Any]) -> str:
    if not result["built"]:
        return "does not build"
    return "{passed} passed, {failed} failed, {skipped} skipped".format(**result)


def wheel() -> str:
    import torch

    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def record(args: argparse.Namespace) -> int:
    built = args.results.exists()  # scripts/test.sh creates it after the build
    result: dict[str, Any] = {
        "row": args.row,
        "tests": args.tests,
        "torch": version("torch"),
        "wheel": wheel(),
        "python": platform.python_version(),
        "compiler": args.compiler,
        "compiler_kind": args.compiler_kind,
        "standard": args.standard,
        "defines": args.defines,
        "built": built,
        "seconds": args.seconds,
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or commit(),
    }
    if built:
        if args.tests == "cuda":
            from apex import _build_info

            result["cuda"] = _build_info.cuda_reason
        counts = test_summary.count(args.results)
        result |= {kind: counts[kind] for kind in ("passed", "failed", "skipped")}
        result["failures"] = sorted(test_summary.failures(args.results))
        if args.status and not counts["failed"]:
            result["failed"] = 1
            result["failures"] = [f"scripts/test.sh ended with status {args.status}"]
    with args.file.open("a") as lines:
        lines.write(json.dumps(result) + "\n")
    return 0


def known(args: argparse.Namespace) -> int:
    result = load(args.file).get(f"{args.row} {args.tests}")
    if result and result["commit"] == commit():
        print(outcome(result))
    return 0


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    rows = [list(head), *map(list, lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "".join("| " + " | ".join(row) + " |\n" for row in padded)


def compiler_of(result: dict[str, Any]) -> str:
    # "g++ (Debian 12.2.0-14) 12.2.0", "Debian clang version 19.1.7 (3~deb12u1)"
    words = result["compiler"].replace("(", " ").replace(")", " ").split()
    numbers = [word for word in words if word[0].isdigit() and "-" not in word]
    name = {"gcc": "GCC", "clang": "clang"}[result["compiler_kind"]]
    host = f"{name} {numbers[0] if numbers else ''}".strip()
    # "nvcc 13.0.88, libtorch for CUDA 13.0"
    return ", ".join([host, *result.get("cuda", "").split(", ")[:1]]).removesuffix(", ")


def page(args: argparse.Namespace) -> int:
    plan = dict(line.rstrip("\n").split("|", 1) for line in sys.stdin)
    results = load(args.file)
    shown = [
        results[key]
        for name in plan
        for key in (f"{name} full", f"{name} quick", f"{name} python", f"{name} cuda")
        if key in results
    ]
    if not shown:
        print(f"no results: {args.page} is left as it is")
        return 0
    lines = [
        (
            r["torch"], r["wheel"], r["python"], compiler_of(r), f"C++{r['standard']}",
            r["tests"], outcome(r), r["date"], r["commit"],
        )
        for r in shown
    ]  # fmt: skip
    head = ("torch", "wheel", "Python", "compiler", "standard", "tests", "result", "date", "commit")
    text = HEAD
    plain = [r for r in shown if r["tests"] != "cuda"]
    for options in sorted({r["defines"] for r in plain if r["defines"]}):
        names = [r["row"] for r in plain if r["defines"] == options]
        of = "" if len(names) == len(plain) else " (" + ", ".join(names) + ")"
        text += f"- Built with `{options}`{of}.\n"
    text += "\n" + table(head, lines)
    bad = [r for r in shown if r.get("failures")]
    if bad:
        text += "\n## Failures\n"
        for r in bad:
            text += f"\n{r['row']}:\n\n" + "".join(f"- `{name}`\n" for name in r["failures"])
    run = {r["row"] for r in shown}
    rest = [(name, lacks or args.reason) for name, lacks in plan.items() if name not in run]
    if rest:
        text += "\n## Not run\n\n" + "".join(f"- {name}: {why}\n" for name, why in rest)
    args.page.write_text(text)
    print(f"wrote {args.page}: {len(shown)} results, {len(rest)} rows not run")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("commit").set_defaults(action=print_commit)
    for action in (record, known, page):
        command = commands.add_parser(action.__name__)
        command.set_defaults(action=action)
        command.add_argument("file", type=Path)
        if action is page:
            command.add_argument("page", type=Path)
            command.add_argument("--reason", default="not run", help="of rows that could be run")
            continue
        command.add_argument("--row", required=True)
        command.add_argument("--tests", required=True)
        if action is record:
            command.add_argument("--results", type=Path, required=True)
            command.add_argument("--status", type=int, required=True)
            command.add_argument("--seconds", type=int, required=True)
            command.add_argument("--commit", help="that of the sources when the row began")
            for name in ("--compiler", "--compiler-kind", "--standard", "--defines"):
                command.add_argument(name, required=True)
    args = parser.parse_args()
    result: int = args.action(args)
    return result


if __name__ == "__main__":
    sys.exit(main())
