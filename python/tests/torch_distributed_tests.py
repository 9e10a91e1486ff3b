# SPDX-License-Identifier: BSD-3-Clause
"""Runs the tests of collectives that ship with torch, on the backend ``apex``.

    python python/tests/torch_distributed_tests.py [--world 4] [--backend gloo] [TEST ...]

They are the tests of ``torch.testing._internal.distributed.distributed_test`` that torch runs on
Gloo. Needs ``pip install expecttest``. Each test has its own processes. Prints a line per test, and
its failures. The exit code is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import apex  # noqa: F401  (registers the backend)

LEFT_OUT = {
    "test_ddp_logging_data_cpu": "torch logs the name of every backend that it does not ship as "
    '"custom" (c10d::ProcessGroup::getBackendName), and the test expects the name it was given',
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs torch's tests of collectives.")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="all of them by default")
    parser.add_argument("--world", type=int, default=2, help="ranks; 2 by default")
    parser.add_argument("--backend", choices=["apex", "gloo"], default="apex")
    return parser.parse_args()


# torch's module reads these when it is imported, and skips the tests that it skips for Gloo.
OPTIONS = parse_arguments()
FOLDER = Path(tempfile.mkdtemp(prefix="torch-distributed-tests-"))
os.environ["BACKEND"] = "gloo"
os.environ["WORLD_SIZE"] = str(OPTIONS.world)
os.environ["TEMP_DIR"] = str(FOLDER)
os.environ["INIT_METHOD"] = f"file://{FOLDER}/store"
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "120")

from torch.testing._internal.distributed import distributed_test as torch_tests  # noqa: E402


class AsGloo(str):
    """A backend name for which the tests have the same expectations as for Gloo."""

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """``dist.monitored_barrier``, which refuses every backend that is not named gloo."""
    group = group or dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    timeout = timeout or group._get_backend(torch.device("cpu")).options._timeout
    group.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


def run_on_apex() -> None:
    os.environ["BACKEND"] = torch_tests.BACKEND = AsGloo("apex")
    dist.monitored_barrier = monitored_barrier
    # Names in a profile: operations that Gloo carries keep Gloo's names.
    torch_tests.PROFILING_SUPPORTED_BACKENDS.append("apex")
    events = torch_tests.get_profiling_event

    def events_of_both(name: str, *arguments: Any, **options: Any) -> Any:
        found = events(name, *arguments, **options)
        return found or events(name.replace("apex:", "gloo:"), *arguments, **options)

    torch_tests.get_profiling_event = events_of_both


class Tests(torch_tests.TestDistBackend, torch_tests.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        (FOLDER / "store").unlink(missing_ok=True)
        # Forked, not spawned, because importing torch takes longer than most of these tests.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        super()._check_return_codes(fn, elapsed_time)  # checks only the first rank
        if fn not in self.skip_return_code_checks:
            self.assertEqual({process.exitcode for process in self.processes}, {0})


def outcome_of(name: str) -> tuple[str, str]:
    if name in LEFT_OUT and OPTIONS.backend == "apex":
        return "left out", LEFT_OUT[name]
    result = unittest.TestResult()
    Tests(name).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    failed = result.errors + result.failures
    return ("failed", failed[0][1]) if failed else ("passed", "")


def main() -> int:
    if OPTIONS.backend == "apex":
        run_on_apex()
    counts = dict.fromkeys(("passed", "failed", "left out", "skipped"), 0)
    for name in OPTIONS.tests or unittest.TestLoader().getTestCaseNames(Tests):
        start = time.monotonic()
        outcome, text = outcome_of(name)
        counts[outcome] += 1
        print(f"{outcome} {name} ({time.monotonic() - start:.1f} s) {text}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
