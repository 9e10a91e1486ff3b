#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Mutation testing: breaks the engine in about 200 places, one at a time, and runs the tests.

    pip install tree-sitter tree-sitter-cpp    # into .venv, which scripts/test.sh creates
    .venv/bin/python scripts/mutate.py

Mutants are found in the syntax trees of C++ and Python. scripts/mutation/areas.py lists the
sources, the number of mutants drawn from each area, and the tests. All mutants are compiled at
once into a copy of the sources under build/mutate. The environment variable APEX_MUTANT selects one
by its number. A first run of all tests records which mutants each test reaches. Then each mutant
is run with the tests that reach it, the fastest first, until one fails, crashes or does not end.

An interrupted campaign resumes where it stopped. Its verdicts at that point are spread evenly over
all areas. A verdict is kept until the mutated line is edited. After adding tests, --retry runs the
mutants again that were not caught. build/mutate/mutants.tsv lists every mutant and the test that
caught it.

Each mutant that no test catches needs a test, or a reason in scripts/mutation/reasons.toml. A
mutant whose reason begins with "Equivalent:" cannot change anything that a user sees. It is
excluded from the percentage, caught / (mutants - equivalent). Mutants that change the speed, the
memory use or the text of an error are included. Needs Python 3.11. The exit status is 1 if the
percentage is below 95, or if a mutant that was not caught has no reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    from mutation import report
    from mutation.model import Mutant, draw
    from mutation.suite import Suite
    from mutation.workspace import Workspace
except ModuleNotFoundError as missing:
    sys.exit(
        f"mutate.py: there is no {missing.name} here: "
        "run `pip install tree-sitter tree-sitter-cpp`."
    )

ROOT = Path(__file__).resolve().parents[1]
WANTED = 0.95


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of every area's quota")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/mutate")
    parser.add_argument(
        "--python",
        type=Path,
        default=ROOT / ".venv/bin/python",
        help="the interpreter that has torch and pytest",
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants tested at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after that")
    parser.add_argument(
        "--most-seconds", type=float, default=60, help="of tests of one program for one mutant"
    )
    parser.add_argument("--only", default="", help="mutants whose place contains this")
    parser.add_argument(
        "--cpp-only", action="store_true", help="ask no Python test (then --retry does)"
    )
    parser.add_argument("--retry", action="store_true", help="those not caught, again")
    parser.add_argument("--list", action="store_true", help="print the mutants and do nothing")
    parser.add_argument("--build", action="store_true", help="stop when all is compiled")
    return parser.parse_args()


def prepare(workspace: Workspace, suite: Suite, arguments: argparse.Namespace) -> list[Mutant]:
    """Draw the mutants, compile them, and record the tests."""
    state = workspace.folder / "mutants.json"
    kept = json.loads(state.read_text()) if state.exists() else {"refused": [], "numbers": {}}
    refused, numbers = set(kept["refused"]), kept["numbers"]
    found = workspace.find()
    while True:
        mutants = draw(found, arguments.seed, arguments.scale, refused, numbers)
        if arguments.list:
            return mutants
        state.write_text(json.dumps({"refused": sorted(refused), "numbers": numbers}, indent=1))
        suite.forget_records(workspace.write(mutants))
        workspace.configure()
        bad = workspace.compile(mutants)
        if not bad:
            break
        print(f"{len(bad)} do not compile; others are drawn", flush=True)
        refused |= {mutant.key for mutant in bad}
    if not arguments.build:
        suite.record(len(numbers))
    return mutants


def run(
    mutants: list[Mutant],
    suite: Suite,
    verdicts: dict[str, list[str]],
    arguments: argparse.Namespace,
) -> None:
    """Add the missing verdicts, and save them one by one."""
    state = suite.workspace.folder / "verdicts.json"
    lock = threading.Lock()
    stop = time.monotonic() + arguments.seconds
    tests = suite.tests()
    for test in tests:
        if test.outcome == "failed":
            print(f"left out, for it fails with all mutants off: {test.program} {test.name}")
    tests = [test for test in tests if test.outcome == "passed"]
    reached = {number for test in tests for number in test.reached}

    def judge(mutant: Mutant) -> None:
        if time.monotonic() > stop or arguments.cpp_only and mutant.number not in reached:
            return
        verdict = suite.judge(mutant.number, tests, arguments.most_seconds)
        print(f"{mutant.number} {mutant.path}:{mutant.line}: {': '.join(verdict)}", flush=True)
        with lock:
            verdicts[mutant.key] = list(verdict)
            partial = state.with_suffix(".partial")
            partial.write_text(json.dumps(verdicts, indent=1, sort_keys=True))
            partial.replace(state)

    reasons = report.Reasons()

    def is_missing(mutant: Mutant) -> bool:
        if mutant.key not in verdicts:
            return True
        again = arguments.retry and verdicts[mutant.key][0] != "caught"
        return again and reasons.of(mutant) is None

    place = arguments.only
    missing = [m for m in mutants if place in f"{m.path}:{m.line}" and is_missing(m)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(judge, sorted(missing, key=lambda mutant: mutant.turn)))


def main() -> int:
    arguments = parse()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = arguments.folder.resolve()
    workspace = Workspace(ROOT, folder, arguments.python.absolute())
    suite = Suite(workspace, arguments.cpp_only)
    mutants = prepare(workspace, suite, arguments)
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.number} {mutant.path}:{mutant.line} {mutant.operator}: {mutant.change}")
        return 0
    if arguments.build:
        return 0
    state = folder / "verdicts.json"
    verdicts = json.loads(state.read_text()) if state.exists() else {}
    run(mutants, suite, verdicts, arguments)
    (folder / "mutants.tsv").write_text(report.table(mutants, verdicts))
    reasons = report.Reasons()
    left = [mutant for mutant in mutants if verdicts.get(mutant.key, [""])[0] != "caught"]
    unexplained = [mutant for mutant in left if reasons.of(mutant) is None]
    for mutant in unexplained:
        verdict = ": ".join(verdicts.get(mutant.key, ["not run"]))
        print(f"{mutant.number} {mutant.path}:{mutant.line}: {verdict}: {mutant.change}")
    caught = len(mutants) - len(left)
    equivalent = sum(reasons.is_equivalent(mutant) for mutant in left)
    share = caught / max(len(mutants) - equivalent, 1)
    print(f"{len(mutants)} mutants, {caught} caught, {len(left)} not caught: {equivalent}", end=" ")
    print(f"equivalent, {len(unexplained)} without a reason; {100 * share:.1f} % caught")
    return 0 if share >= WANTED and not unexplained else 1


if __name__ == "__main__":
    sys.exit(main())
