# SPDX-License-Identifier: BSD-3-Clause
"""python -m apex.parallel.multiproc: its processes, the scripts' arguments, and the end of a
job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm import run_script

from apex.parallel import multiproc

# Only a guard against hangs. Nothing here takes nearly this long.
TIMEOUT_S = 600

linux_only = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc"
)

#: Every rank writes the arguments and variables that it got, as one line of JSON, to its own file.
REPORT = """
    import json, os, pathlib, sys
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    told = {name: os.environ[name] for name in names.split()}
    path = pathlib.Path(os.environ["REPORT_TO"]) / told["RANK"]
    path.write_text(json.dumps({"env": told, "argv": sys.argv[1:], "pid": os.getpid()}))
"""
#: A parser in another module than the script. REPORT follows, to see the arguments.
TAKES_ALL = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--lr")
    parser.add_argument("files", nargs="*")
    args = parser.parse_args()
    assert args.rank == args.local_rank >= 0 and args.world_size >= 1
"""
#: The parser of a script for torchrun, in which --rank is no process's.
TAKES_ANOTHER_RANK = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=4, help="of the matrices")
    assert parser.parse_known_args()[0].rank == 4
"""
#: After this, all ranks have started.
MEET_IN_GROUP = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
"""
#: The same without torch, whose import takes longer than most jobs here.
MEET = """
    import os, pathlib, time
    place = pathlib.Path(os.environ["REPORT_TO"])
    (place / os.environ["RANK"]).touch()
    while len(list(place.iterdir())) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
"""
#: Every rank waits until the launcher ends it. Rank 0 reports when all have started.
WAIT = """
    import os, signal
    if os.environ["RANK"] == "0":
        print("all here")  # a pipe, and no flush: output is not buffered
    while True:
        signal.pause()
"""
#: This rank fails, and the others wait until they are stopped: by the signal itself, as most
#: scripts are, or by their own handler.
FAIL = """
    import os, signal, sys
    if os.environ["RANK"] == os.environ["FAILING_RANK"]:
        how = sys.argv[1]
        if how == "raise":
            raise ValueError("no more apples")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(int(how))
    if "HANDLES_SIGTERM" in os.environ:
        code = int(os.environ["HANDLES_SIGTERM"])
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    while True:
        signal.pause()
"""


class Job:
    """A launcher in a separate folder, and the output of its ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports = folder / "reports"
        self.reports.mkdir()
        self.launchers: list[subprocess.Popen[str]] = []

    def write(self, *sources: str) -> None:
        (self.folder / "job.py").write_text("".join(map(textwrap.dedent, sources)))

    def environment(self, **env: str) -> dict[str, str]:
        launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        kept = {name: value for name, value in os.environ.items() if name not in launchers}
        kept.pop("OMP_NUM_THREADS", None)
        return {
            **kept,
            "REPORT_TO": str(self.reports),
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(self.folder),  # a killed launcher leaves its folder behind
            **env,
        }

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        # The ranks inherit the pipes, so end of file means that no process of the job is left.
        process = subprocess.Popen(
            [sys.executable, "-m", "apex.parallel.multiproc", *command],
            cwd=self.folder,
            env=self.environment(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.launchers.append(process)
        return process

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The launcher is forked from a process that has imported torch (see warm)."""
        place = {"cwd": self.folder, "env": self.environment(**env)}
        return run_script(multiproc.__file__, *command, **place, timeout_s=TIMEOUT_S)

    def finish(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        """Wait until the launcher and all processes that have its output open have ended."""
        out, err = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def report(self, rank: int) -> dict:
        return json.loads((self.reports / str(rank)).read_text())

    def ranks(self) -> list[int]:
        return sorted(int(path.name) for path in self.reports.iterdir())

    def living(self) -> list[int]:
        """The processes with this folder in their environment, without zombies."""
        mark = f"REPORT_TO={self.reports}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
            except OSError:
                continue
        return found

    def outlive(self, expected: int = 0, limit_s: float = 60) -> list[int]:
        """The processes of :meth:`living`, when no more than expected remain. The kernel ends them
        one after another."""
        deadline = time.monotonic() + limit_s
        while len(found := self.living()) > expected and time.monotonic() < deadline:
            time.sleep(0.01)
        return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for process in job.launchers:
        if process.poll() is None:
            process.kill()
            process.wait()


# --- the started processes ---


@pytest.mark.processes
def test_environment_every_rank_is_complete(job: Job) -> None:
    job.write(REPORT)
    done = job.finish(job.start("--nproc", "3", "job.py"))
    assert done.returncode == 0, done.stderr
    assert job.ranks() == [0, 1, 2]
    reports = [job.report(rank)["env"] for rank in range(3)]
    for rank, env in enumerate(reports):
        assert env["RANK"] == env["LOCAL_RANK"] == str(rank)
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "3"
        assert int(env["OMP_NUM_THREADS"]) >= 1
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in reports}) == 1


def test_processes_default_is_gpus_or_else_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiproc, "_cores", lambda: 6)
    for gpus, processes in (8, 8), (0, 6):
        monkeypatch.setattr(multiproc.cuda, "device_count", lambda gpus=gpus: gpus)
        assert multiproc.parse(["job.py"]).processes == processes
    assert multiproc.parse(["--nproc=2", "job.py", "my--world-size=4"]).processes == 2
    assert multiproc.parse(["--nnodes=2", "job.py", "--world_size=6"]).processes == 3


@pytest.mark.processes
def test_output_rank_0_on_terminal_others_in_logs(job: Job) -> None:
    job.write(
        "import os, sys\n",
        'print("out of", os.environ["RANK"])\n',
        'print("err of", os.environ["RANK"], file=sys.stderr)\n',
    )
    done = job.run("--nproc=2", "--log-dir=logs/new", "job.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "out of 0\n"
    assert "err of 0" in done.stderr
    assert "of 1" not in done.stdout + done.stderr
    assert (job.folder / "logs/new/rank_1.log").read_text() == "out of 1\nerr of 1\n"
    assert [path.name for path in (job.folder / "logs/new").iterdir()] == ["rank_1.log"]
    assert list(job.folder.glob("*.log")) == []


# --- the arguments of scripts ---


@pytest.mark.processes
def test_rank_options_go_to_the_parser_of_another_module(job: Job) -> None:
    (job.folder / "options.py").write_text(textwrap.dedent(TAKES_ALL))
    job.write("import options\n", REPORT)
    arguments = ["--lr", "0.1", "a", "--", "--rank=7"]
    done = job.run("--nproc=2", "job.py", *arguments)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        expected = [f"--local_rank={rank}", "--world-size=2", f"--rank={rank}", *arguments]
        assert job.report(rank)["argv"] == expected


@pytest.mark.processes
@pytest.mark.parametrize("source", [TAKES_ANOTHER_RANK, ""], ids=["torchrun_style", "none"])
def test_script_without_rank_options_gets_its_arguments_alone(job: Job, source: str) -> None:
    job.write(source, REPORT)
    # The agent substitutes ${local_rank} and $$ in its arguments. These must arrive unchanged.
    arguments = ["--name", "a b", "$$x", "${local_rank}", "--", "--nproc=7"]
    done = job.run("--nproc=2", "job.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert job.report(0)["argv"] == job.report(1)["argv"] == arguments


@pytest.mark.processes
def test_world_size_of_script_is_the_number_of_processes(job: Job) -> None:
    job.write(TAKES_ALL, REPORT)
    done = job.run("job.py", "--world-size", "3", "--lr=1")
    assert done.returncode == 0, done.stderr
    assert job.ranks() == [0, 1, 2]
    expected = ["--local_rank=2", "--rank=2", "--world-size", "3", "--lr=1"]
    assert job.report(2)["argv"] == expected


# --- the end of a job ---


@pytest.mark.processes
@linux_only
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("how", "code", "complaint", "others"),
    [
        ("raise", 1, "ValueError: no more apples", {}),
        ("7", 7, "failed with exit code 7", {}),
        ("kill", 137, "failed with signal SIGKILL", {}),
        ("7", 7, "failed with exit code 7", {"HANDLES_SIGTERM": "3"}),
    ],
)
def test_failing_rank_stops_all_and_is_shown(
    job: Job, failing: int, how: str, code: int, complaint: str, others: dict[str, str]
) -> None:
    job.write(MEET_IN_GROUP if how == "raise" else MEET, FAIL)
    done = job.run("--nproc=2", "job.py", how, FAILING_RANK=str(failing), **others)
    assert done.returncode == code, done.stderr
    assert complaint in done.stderr
    assert f"multiproc: rank {failing} failed with " in done.stderr
    assert f"rank {1 - failing} failed" not in done.stderr
    assert done.stderr.count("Traceback") == (how == "raise")
    assert (job.folder / "rank_1.log").is_file()  # even if empty, because the job failed
    assert job.living() == []


@pytest.mark.processes
@linux_only
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_or_killed_launcher_leaves_no_process(job: Job, how: signal.Signals) -> None:
    job.write(MEET, WAIT)
    launcher = job.start("--nproc=2", "job.py")
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "all here\n"
    launcher.send_signal(how)
    code = job.finish(launcher).returncode  # returns when rank 0 has closed the pipe
    assert code == (128 + how if how == signal.SIGTERM else -how)
    assert job.outlive() == []


# --- arguments of the launcher ---


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nproc=two", "job.py"], "two"),
        (["--nproc"], "--nproc: expected one argument"),
        ([], "the following arguments are required: training_script"),
        (["--nproc=2", "job.py", "--world-size", "3"], "--world-size is not --nproc x --nnodes"),
        (["--nnodes=2", "job.py", "--world-size", "3"], "--world-size is not --nproc x --nnodes"),
    ],
)
def test_bad_argument_ends_with_its_name(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError)) as stopped:
        multiproc.parse(arguments)
    assert complaint in capsys.readouterr().err + str(stopped.value)


def test_master_address_selects_the_rendezvous() -> None:
    alone = multiproc.parse(["--nproc=2", "--master-port=0", "job.py"])
    assert (alone.rdzv_backend, alone.rdzv_endpoint) == ("c10d", "127.0.0.1:0")  # any free port
    node = ["--nproc=2", "--nnodes=2", "--node-rank=1", "--master-addr=node0", "job.py"]
    assert multiproc.parse(node).rdzv_backend == "static"
    assert (multiproc.parse(node).master_addr, multiproc.parse(node).master_port) == (
        "node0",
        29500,
    )
