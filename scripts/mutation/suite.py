# SPDX-License-Identifier: BSD-3-Clause
"""Which tests reach which mutants, and the results of tests with a mutant switched on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .areas import CPP_TESTS, PYTHON_TESTS
from .workspace import RUNTIME, Workspace

#: A test hangs if it takes this many times as long as recorded, and at least this many seconds.
TIMES_AS_LONG, AT_LEAST_SECONDS = 10, 20
#: The time to start a program that loads torch, on a busy machine.
START_SECONDS = 60
#: How often tests are repeated that also fail with the mutant off.
ATTEMPTS = 3
#: Tests run in two calls: the fastest, up to this total time, and then all others.
FIRST_SECONDS = 2

FAILED = re.compile(r"^(?:\[  FAILED  \]|FAILED|ERROR) (?:\S*python/tests/)?(\S+)", re.MULTILINE)


@dataclass
class Test:
    program: str  #: one of CPP_TESTS, or "pytest"
    name: str
    outcome: str
    seconds: float
    reached: list[int]


class Suite:
    def __init__(self, workspace: Workspace, cpp_only: bool = False) -> None:
        self.workspace = workspace
        self.python_tests = () if cpp_only else PYTHON_TESTS
        self.records = workspace.folder / "records"

    def _command(self, program: str, names: list[str] | None) -> list[str]:
        if program != "pytest":
            path = self.workspace.build / "cpp/tests" / program
            chosen = [f"--gtest_filter={':'.join(names)}"] if names else []
            return [str(path), "--gtest_brief=1", "--gtest_fail_fast", *chosen]
        root = self.workspace.root
        return (
            [str(self.workspace.interpreter), "-m", "pytest", "-c", f"{root}/pyproject.toml"]
            + ["--rootdir", str(root), "-p", "no:cacheprovider", "-p", "apex_mutant", "-q", "-x"]
            + [f"{root}/{name}" for name in names or []]
        )

    def _run(
        self, command: list[str], seconds: float | None, **variables: str
    ) -> tuple[int | None, str]:
        """Exit status (None if it was killed) and output."""
        environment = dict(os.environ, OMP_NUM_THREADS="1", **variables)
        environment["PYTHONPATH"] = f"{self.workspace.overlay}:{RUNTIME}"
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment["APEX_CPP_BUILD"] = str(self.workspace.build)
        environment["PATH"] = f"{self.workspace.interpreter.parent}:{environment['PATH']}"
        with subprocess.Popen(
            ["bash", "-c", 'ulimit -c 0; exec "$@"', "bash", *command],
            cwd=self.workspace.folder, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        ) as process:  # fmt: skip
            status: int | None = None
            try:
                output, _ = process.communicate(timeout=seconds)
                status = process.returncode
            except subprocess.TimeoutExpired:
                output = ""
            # Also kill ranks that it started and left running.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            return status, output or ""

    def record(self, count: int) -> None:
        """Run every test with all mutants off."""
        self.records.mkdir(exist_ok=True)
        seen = self.workspace.folder / "seen"
        for name, command in self._recordings().items():
            target = self.records / f"{name}.tsv"
            if target.exists() and self._is_newer_than_tests(name, target):
                continue
            partial = target.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            seen.write_bytes(bytes(max(count, 1)))
            _, output = self._run(
                command, None, APEX_MUTANT_SEEN=str(seen), APEX_MUTANT_RECORD=str(partial)
            )
            (self.records / f"{name}.log").write_text(output)
            if not partial.exists():
                raise RuntimeError(f"{name} ran no test: see {self.records}/{name}.log")
            partial.rename(target)

    def _is_newer_than_tests(self, name: str, record: Path) -> bool:
        if name in CPP_TESTS:
            files = [self.workspace.build / "cpp/tests" / name]
        else:  # the tests that it calls, and shared files
            called = [self.workspace.root / part for part in self._recordings()[name]]
            shared = (self.workspace.root / "python/tests").glob("*.py")
            files = [file for file in called if file.suffix == ".py"]
            files += [file for file in shared if not file.name.startswith("test_")]
        return all(file.stat().st_mtime < record.stat().st_mtime for file in files)

    def _recordings(self) -> dict[str, list[str]]:
        commands = {
            program: [part for part in self._command(program, None) if "fail_fast" not in part]
            for program in CPP_TESTS
        }
        tests = self.workspace.root / "python/tests"
        for number, arguments in enumerate(self.python_tests):
            options = [argument for argument in arguments if ".py" not in argument]
            files = sorted(
                str(file.relative_to(self.workspace.root))
                for pattern in arguments
                if ".py" in pattern
                for file in tests.glob(pattern)
            )
            command = [part for part in self._command("pytest", files) if part != "-x"]
            commands[f"pytest{number}"] = command + options
        return commands

    def forget_records(self, changed: set[str]) -> None:
        """Delete the records of programs that `changed` affects. record() detects changes of C++
        tests."""
        if all(path.startswith("cpp/tests/") for path in changed):
            return
        python_only = all(path.startswith("python/apex/") for path in changed)
        for file in self.records.glob("*.tsv"):
            if not python_only or file.stem not in CPP_TESTS:
                file.unlink()

    def tests(self) -> list[Test]:
        """The tests that passed, the fastest of each program first."""
        found: dict[tuple[str, str], Test] = {}
        for name in self._recordings():
            program = "pytest" if name.startswith("pytest") else name
            for row in (self.records / f"{name}.tsv").read_text().splitlines():
                test, outcome, milliseconds, reached = row.split("\t")
                seconds = int(milliseconds) / 1000
                numbers = [int(number) for number in reached.split()]
                found.setdefault((program, test), Test(program, test, outcome, seconds, numbers))
        return sorted(found.values(), key=lambda test: test.seconds)

    def judge(self, number: int, tests: list[Test], most_seconds: float) -> tuple[str, str]:
        """("caught", by which test), ("survived", the passed tests) or ("not reached", "")."""
        asked = 0
        for program in (*CPP_TESTS, "pytest"):
            reaching = [t for t in tests if t.program == program and number in t.reached]
            batches: list[list[Test]] = [[], []]
            total = 0.0
            for test in reaching:
                total += test.seconds
                if total <= most_seconds or not batches[0]:
                    batches[total > FIRST_SECONDS and bool(batches[0])].append(test)
            for batch in batches:
                if not batch:
                    continue
                asked += len(batch)
                if verdict := self._ask(number, program, batch):
                    return verdict
        return ("survived", f"{asked} tests") if asked else ("not reached", "")

    def _ask(self, number: int, program: str, batch: list[Test]) -> tuple[str, str] | None:
        """The verdict of these tests, or None if they passed.

        On a machine that other programs keep busy, a test may fail or time out for that reason
        alone. So a failed test must pass immediately afterwards with the mutant off, within the
        same time. A test that times out is repeated once.
        """
        limit = START_SECONDS + max(
            AT_LEAST_SECONDS, TIMES_AS_LONG * sum(test.seconds for test in batch)
        )
        hung = False
        for _ in range(ATTEMPTS):
            command = self._command(program, [test.name for test in batch])
            status, output = self._run(command, limit, APEX_MUTANT=str(number))
            if status == 0:
                return None
            if program == "pytest" and status not in (None, 1, 2) and status > 0:
                raise RuntimeError(f"pytest could not run {batch}:\n{output}")
            failed = FAILED.search(output)
            last = output.strip().splitlines()[-1:] or [""]
            by, names = f"exit status {status}: {last[0][:100]}", [test.name for test in batch]
            if status is None:
                by = f"no end within {limit:.0f} s"
            elif failed:
                by = failed[1].rstrip(",")
                names = [name for name in names if by in name] or names
            passes = self._run(self._command(program, names), limit, APEX_MUTANT="-1")[0] == 0
            if passes and (status is not None or hung):
                return "caught", f"{program}: {by}"
            hung = passes
            limit *= 1 if passes else 2
        return "not settled", f"{program}: {by}, also with the mutant off"
