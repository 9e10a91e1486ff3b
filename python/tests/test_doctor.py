# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex.doctor``: self-tests, measurements in real processes, and its output."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
from ddp_support import free_port
from doctor_support import a_case, a_rank, all_reduces, in_order
from sync_batch_norm_support import DEVICES
from torch import Tensor
from warm import run_script, run_script_on_ranks

from apex import doctor
from apex._doctor import here, job, pairs, report, rules, self_test
from apex.parallel import SyncBatchNorm

# --- batch norm against float64 ---


@pytest.mark.parametrize("device", DEVICES)
def test_self_test_passes_for_every_dtype(device: str) -> None:
    tests = self_test.batch_norm(torch.device(device), rank=2)
    assert {test.dtype for test in tests} == set(self_test.TOLERANCES)
    assert all(test.has_passed and test.rank == 2 for test in tests), tests
    # A bound that rounding never approaches would pass anything.
    assert all(test.error is not None and test.error * 1e4 > test.tolerance for test in tests)


def broken(change: Callable[[Tensor], Tensor]) -> type[SyncBatchNorm]:
    class Broken(SyncBatchNorm):
        def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
            return change(super().forward(input, z))

    return Broken


def refuse(_: Tensor) -> Tensor:
    raise RuntimeError("no kernel image\nand more")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda y: y * 1.1, None),
        (lambda y: y * float("nan"), "a result is infinite or NaN"),
        (refuse, "no kernel image"),
    ],
    ids=["off", "nan", "raises"],
)
def test_self_test_of_wrong_kernels_fails(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor], problem: str | None
) -> None:
    monkeypatch.setattr(self_test, "SyncBatchNorm", broken(change))
    tests = self_test.batch_norm(torch.device("cpu"))
    assert not any(test.has_passed for test in tests)
    assert {test.problem for test in tests} == {problem}
    made = report.make(a_case(self_tests=tests), (), ())
    assert made.has_failed and made.recommendations[0].rule == "failed_self_test"
    assert "FAILED" in report.as_text(made)
    json.dumps(report.as_json(made), allow_nan=False)


# --- two processes here ---


def without_a_launcher() -> dict[str, str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        environment.pop(name, None)
    return environment


def run_doctor(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=without_a_launcher(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.processes
def test_doctor_on_one_host_measures_and_prints_json() -> None:
    done = run_doctor("-m", "apex.doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == [] and len(found["recommendations"]) <= rules.MOST
    measured = {one["backend"]: one for one in found["all_reduces"]}
    assert set(measured) == {"gloo", "apex"}
    for one in measured.values():
        assert 0 < one["latency_s"] < 1 and 1e6 < one["bytes_per_s"] < 1e12
    assert measured["apex"]["shares_memory"] is True and found["not_shared"] is None
    assert {test["dtype"] for test in found["self_tests"]} == set(self_test.TOLERANCES)
    assert found["ranks"][0]["build"]["torch"] == torch.__version__


@pytest.mark.processes
def test_two_processes_that_fail_keep_what_they_measured_and_say_why() -> None:
    """Their files are limited to a megabyte, which is too little for shared memory."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        outcome = here.run(["apex", "no_such_backend"], 60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.backend for one in outcome.measured] == ["apex"]
    assert outcome.measured[0].shares_memory is False
    assert outcome.problem is not None
    assert in_order(["did not measure no_such_backend: ", "no_such_backend"], outcome.problem)
    assert outcome.not_shared is not None
    case = a_case(measured=outcome.measured, not_shared=outcome.not_shared)
    assert in_order(["1048576 bytes", "ulimit -f unlimited"], str(rules.memory_not_shared(case)))


#: Starts `here` with a rank 0 that is late to write its results.
LATE_WRITER = """#!{python}
import json, sys, time
from apex._doctor import here
dumps = json.dumps
json.dumps = lambda value: time.sleep(2) or dumps(value)
here.main(sys.argv[3:])  # behind -m and the module
"""


@pytest.mark.processes
def test_two_processes_results_are_written_before_the_next_backend_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(LATE_WRITER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(here.sys, "executable", str(program))
    outcome = here.run(["gloo", "no_such_backend"], 60)
    assert outcome.problem is not None and "did not measure no_such_backend: " in outcome.problem
    assert [one.backend for one in outcome.measured] == ["gloo"]


@pytest.mark.processes
def test_two_processes_that_take_too_long_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(here.subprocess, "Popen", popen)
    outcome = here.run(["gloo"], 0.05)
    assert outcome.measured == () and outcome.problem is not None
    assert "did not measure gloo: no end within 0.05 s" in outcome.problem
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_two_processes_and_their_files_end_with_a_signal(tmp_path: Path, number: int) -> None:
    sleeping, folder = tmp_path / "sleeping", tmp_path / "tmp"
    sleeping.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeping.chmod(0o755)
    folder.mkdir()
    code = "import sys; from apex._doctor import here; sys.executable = sys.argv[1]; "
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}here.run(['gloo'], 600)", str(sleeping)],
        env={**os.environ, "TMPDIR": str(folder)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 300
        while not list(folder.glob("apex_doctor_*/output1")) and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(300) == -number
        assert list(folder.iterdir()) == []
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("warning", "environment", "reason"),
    [
        ("rank 1 of 2 cannot share memory", {}, "rank 1 of 2 cannot share memory"),
        (None, {"APEX_HOST_CHANNEL": "0"}, "APEX_HOST_CHANNEL=0"),
        (None, {}, "a warning above says why"),
    ],
)
def test_not_shared_names_the_reason(
    warning: str | None, environment: dict[str, str], reason: str
) -> None:
    assert doctor._not_shared(all_reduces(1, 1, shares=True), warning, environment) is None
    assert doctor._not_shared([], warning, environment) is None
    assert doctor._not_shared(all_reduces(1, 1, shares=False), warning, environment) == reason


# --- a job ---

#: Ranks of `warm.py` run this: `python -m apex.doctor`, with changes made before.
SCRIPT = """
import os, sys
rank = int(os.environ["RANK"])
{change}
from apex import doctor
sys.exit(doctor.main(sys.argv[1:]))
"""


def run_job(
    folder: Path, ranks: int, change: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(change=change))
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return run_script_on_ranks(
        ranks, script, *arguments, cwd=folder, env=environment, timeout_s=100
    )


@pytest.mark.processes
def test_job_by_torchrun_prints_once_with_every_pair(tmp_path: Path) -> None:
    options = ["--standalone", "--local-addr=localhost", "--nproc-per-node=3"]
    command = [torch.distributed.run.__file__, *options, "-m", "apex.doctor"]
    place = {"cwd": tmp_path, "env": without_a_launcher(), "timeout_s": 120}
    done = run_script(*command, **place, forks_ranks=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("apex.doctor on 3 ranks of 1 host; rank 0 is on ") == 1
    assert re.findall(r"^  (\d - \d) +\d+ us  +\d+\.\d\d GB/s", done.stdout, re.M) == [
        "0 - 1",
        "0 - 2",
        "1 - 2",
    ]
    assert re.search(r"^  apex +\d+\.\d us +\d+\.\d\d GB/s  in shared memory$", done.stdout, re.M)
    assert re.search(r"^  cpu +passed: float64 ", done.stdout, re.M)
    last = done.stdout.strip().splitlines()[-1]
    assert last == "nothing to change" or re.match(r"[1-5]\. ", last)


@pytest.mark.processes
def test_job_rank_with_another_variable_and_slow_pair_are_named(tmp_path: Path) -> None:
    """The measurement between ranks 1 and 2 is made slow, and must be reported."""
    change = """
os.environ["APEX_STALL_SECONDS"] = "7" if rank == 2 else "5"
os.getloadavg = lambda: (0.0, 0.0, 0.0)
import dataclasses
from apex._doctor import measure
real = measure.pair
def pair(ranks):
    found = real(ranks)
    factor = 100 if ranks == (1, 2) else 1
    return dataclasses.replace(found, bytes_per_s=found.bytes_per_s / factor)
measure.pair = pair
"""
    done = run_job(tmp_path, 3, change, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    given = {one["rule"]: one["finding"] for one in found["recommendations"]}
    variables = "ranks differ in APEX_STALL_SECONDS (7 on rank 2, 5 on ranks 0 and 1)"
    assert given["different_variables"] == variables
    assert given["slow_link"].startswith("between rank 1 and rank 2 the bandwidth is ")
    assert [one["ranks"] for one in found["slow"]] == [[1, 2]]
    assert [one["place"]["rank"] for one in found["ranks"]] == [0, 1, 2]
    assert [one["ranks"] for one in found["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for rank in (1, 2):
        assert (tmp_path / f"rank_{rank}.log").read_text() == ""


@pytest.mark.processes
def test_job_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    done = run_job(tmp_path, 2, "os.environ['WORLD_SIZE'] = '4'", "--timeout-s", "5")
    assert done.returncode == 1
    assert "failed: ranks 2 and 3 of 4 did not join within 5 s." in done.stdout, done.stdout
    assert (tmp_path / "rank_1.log").read_text() == ""


@pytest.mark.processes
def test_job_rank_without_a_network_card_is_named_at_once(tmp_path: Path) -> None:
    change = "os.environ['GLOO_SOCKET_IFNAME'] = 'no_card' if rank == 1 else 'lo'"
    done = run_job(tmp_path, 2, change, "--timeout-s", "20")
    assert done.returncode == 1
    assert "failed: Gloo cannot connect the ranks" in done.stdout
    assert "GLOO_SOCKET_IFNAME names no_card on rank 1" in done.stdout


@pytest.mark.processes
def test_job_failure_of_one_rank_is_told_with_its_rank(tmp_path: Path) -> None:
    change = """
from apex._doctor import measure
real = measure.pair
def pair(ranks):
    if rank == 1:
        raise RuntimeError("no buffer space")
    return real(ranks)
measure.pair = pair
"""
    done = run_job(tmp_path, 2, change, "--timeout-s", "20")
    assert done.returncode == 1
    assert in_order(["failed: ", "rank 1: no buffer space"], done.stdout), done.stdout


#: A rank prints its exit code, because exiting with it would end the other ranks.
PRINT_CODE = """
from apex import doctor
print("exit code", doctor.main(sys.argv[1:]), file=sys.stderr)
sys.exit()
"""
#: Ranks 0, 1 and again 1 of 2. The third process starts before or after the plan exists.
TWICE = """
import time
from apex._doctor import job
os.environ.update(WORLD_SIZE="2", RANK=str(min(rank, 1)))
late, connect, collect, measure = {late}, job._connect, job._collect, job._measure_pairs
def new_connect(*arguments):
    job.store = connect(*arguments)
    if rank == 2 and late:
        job.store.wait(["plan"])
    return job.store
def new_collect(*arguments):
    while not late and not job.store.check(["conflict"]):
        time.sleep(0.01)
    return collect(*arguments)
def new_measure(*arguments):
    job.store.wait(["conflict"])
    return measure(*arguments)
job._connect, job._collect, job._measure_pairs = new_connect, new_collect, new_measure
"""


@pytest.mark.processes
@pytest.mark.parametrize("late", [False, True])
def test_job_two_processes_of_one_rank_are_named_by_all(tmp_path: Path, late: bool) -> None:
    done = run_job(tmp_path, 3, TWICE.format(late=late) + PRINT_CODE, "--timeout-s", "60")
    finding = r"two processes have RANK=1, one of them process \d+ on host .*: give every process"
    assert re.search(f"^failed: {finding}", done.stdout, re.M), done.stdout + done.stderr
    assert done.stderr == "exit code 1\n"
    for rank in (1, 2):
        log = (tmp_path / f"rank_{rank}.log").read_text()
        assert re.match(f"apex.doctor: rank 1: {finding}.*\nexit code 1\n$", log), log


#: Ranks other than 0 are late to read the conflict.
LATE_READER = """
import time
from apex._doctor import job
conflict = job._conflict
job._conflict = lambda store: time.sleep(min(rank, 1)) or conflict(store)
"""


@pytest.mark.processes
def test_job_two_processes_of_rank_0_on_one_host_are_named(tmp_path: Path) -> None:
    """One of them owns the port. It waits for rank 2, which never arrives, and until the others
    have read the conflict."""
    change = LATE_READER + "os.environ['RANK'] = str(rank % 2)" + PRINT_CODE
    done = run_job(tmp_path, 3, change, "--timeout-s", "10")
    found = [done.stdout + done.stderr] + [
        (tmp_path / f"rank_{rank}.log").read_text() for rank in (1, 2)
    ]
    for output in found:
        assert "two processes have RANK=0" in output and "exit code 1" in output, found


@pytest.mark.processes
def test_job_with_two_world_sizes_names_them(tmp_path: Path) -> None:
    change = "os.environ['WORLD_SIZE'] = str(2 + rank)" + PRINT_CODE
    done = run_job(tmp_path, 2, change, "--timeout-s", "60")
    log = (tmp_path / "rank_1.log").read_text()
    for output in (done.stdout + done.stderr, log):
        assert re.search(r"WORLD_SIZE is (3 on rank 1 and 2|2 on rank 0 and 3) on rank ", output)
        assert output.endswith("exit code 1\n")


@pytest.mark.processes
def test_job_ends_on_other_ranks_when_rank_0_is_stopped(tmp_path: Path) -> None:
    change = """
import signal
from apex._doctor import job
if rank == 0:
    job._all_reduce = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
"""
    done = run_job(tmp_path, 2, change, "--timeout-s", "5")
    assert done.returncode == 1 and done.stdout == ""
    log = (tmp_path / "rank_1.log").read_text()
    assert "apex.doctor: rank 1: Gloo, or a measurement, failed on rank 1: " in log, log


@pytest.mark.processes
@pytest.mark.parametrize("interrupted", [False, True])
def test_job_ends_when_another_program_has_the_port(interrupted: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        with subprocess.Popen(
            [sys.executable, "-m", "apex.doctor", f"--timeout-s={600 if interrupted else 1}"],
            env={**os.environ, "RANK": "1", "WORLD_SIZE": "2", **master},
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                server.settimeout(300)
                connection, _ = server.accept()
                with connection:
                    if interrupted:
                        process.send_signal(signal.SIGINT)
                    _, errors = process.communicate(timeout=300)
            finally:
                process.kill()
    if interrupted:
        assert process.returncode == -signal.SIGINT and errors == ""
    else:
        assert process.returncode == 1
        assert in_order(["was not reached within 1 s (no answer)", "no other program"], errors)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is '', but must be a number from 1 to "),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', but "),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1', but "),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set: set both, "),
        ({"RANK": ""}, "RANK is '', but "),
        ({"RANK": "x\n"}, "rank x\\n: RANK is 'x\\n', but "),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "number from 0 to 1 with WORLD_SIZE=2: set it as "),
        ({"RANK": "0", "LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1', but "),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT is '99999', but "),
    ],
)
def test_wrong_environment_is_named_with_the_remedy(
    variables: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "_self_tests", lambda _: [])
    for name, value in {"MASTER_ADDR": "127.0.0.1", **variables}.items():
        monkeypatch.setenv(name, value)
    assert doctor.main([]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


def test_job_without_a_master_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert doctor.main([]) == 1
    assert "rank 1: RANK and WORLD_SIZE are set, but not MASTER_ADDR" in capsys.readouterr().err
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert doctor.main(["--timeout-s", "1"]) == 1
    assert "was not reached within 1 s" in capsys.readouterr().err


def test_arguments_that_are_wrong_end_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("0", "nan", "inf"):
        with pytest.raises(SystemExit) as ended:
            doctor.main(["--timeout-s", value])
        assert ended.value.code == 2
        assert f"{value} is not a positive number" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        doctor.main(["--help"])
    assert "--json" in capsys.readouterr().out


# --- text ---


def test_text_escapes_control_characters_and_what_the_encoding_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = [{"NCCL_NET": "gr\u00f6\u00dfe\n1. \x1b[31m\udcff"}, {}]
    case = a_case(*(a_rank(rank, variables=value) for rank, value in enumerate(values)))
    made = report.make(case, (), ())
    assert "(gr\u00f6\u00dfe\\n1. \\x1b[31m\\udcff on rank 0" in report.as_text(made)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(doctor, "examine_host", lambda *_: made)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    assert doctor.main([]) == 0
    assert rb"(gr\xf6\xdfe\n1. " in written.getvalue()


def test_text_of_a_job_on_two_hosts_names_hosts_and_the_slow_pair() -> None:
    case = a_case(*(a_rank(rank, "abc"[rank // 2]) for rank in range(6)))
    links = [
        pairs.Pair((0, 2), 90e-6, 1.1e9),
        pairs.Pair((0, 4), 95e-6, 1.2e9),
        pairs.Pair((2, 4), 95e-6, 0.1e9),
    ]
    case = dataclasses.replace(case, slow=pairs.slow(links))
    text = report.as_text(report.make(case, links, ()))
    assert "apex.doctor on 6 ranks of 3 hosts; rank 0 is on a" in text
    assert re.search(r"^  b +2 and 3 +4 +4 +0 +10\.0\.0\.98$", text, re.M)
    assert re.search(r"^  2 \(b\) - 4 \(c\) +95 us +0\.10 GB/s  slow$", text, re.M)
    assert len(re.findall(r"slow$", text, re.M)) == 1
    assert "1. between rank 2 (host b) and rank 4 (host c) the bandwidth is 0.1 GB/s" in text


def test_text_of_many_ranks_on_one_host_says_that_pairs_are_left_out() -> None:
    for count, said in ((job.MOST_LOCAL_RANKS, False), (job.MOST_LOCAL_RANKS + 1, True)):
        case = a_case(*(a_rank(rank) for rank in range(count)))
        text = report.as_text(report.make(case, (), ()))
        assert ("not measured among more than 8 ranks of one host" in text) == said
        failed = report.as_text(report.make(case, (), ["a rank did not come"]))
        assert "not measured" not in failed and "failed: a rank did not come." in failed


def test_text_of_many_pairs_shows_the_slowest() -> None:
    count = 9
    links = [
        pairs.Pair(both, 1e-4, 1e9 + number)
        for number, both in enumerate(itertools.combinations(range(count), 2))
    ]
    case = a_case(*(a_rank(rank, f"a{rank}") for rank in range(count)))
    text = report.as_text(report.make(case, links[::-1], ()))
    assert text.count(" us ") == report.MOST_PAIRS
    assert "0 (a0) - 1 (a1)" in text and "7 (a7) - 8 (a8)" not in text
    assert "and 8 faster pairs; the median of all is 1.00 GB/s" in text
