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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ddp_support import free_port
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
TAKES_ALL = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--lr")
    parser.add_argument("files", nargs="*")
    parser.parse_args()
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
        return self._run(self.folder, command, env)

    def run_nodes(
        self, nodes: int, *command: str, **env: str
    ) -> list[subprocess.CompletedProcess[str]]:
        """Launchers of one job, each with its --node-rank and in a separate folder."""

        def run_node(node: int) -> subprocess.CompletedProcess[str]:
            folder = self.folder / f"node{node}"
            folder.mkdir()
            return self._run(folder, (f"--node-rank={node}", *command), env)

        with ThreadPoolExecutor(nodes) as pool:
            return list(pool.map(run_node, range(nodes)))

    def _run(
        self, folder: Path, command: tuple[str, ...], env: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        whole = self.environment(**env)
        return run_script(multiproc.__file__, *command, cwd=folder, env=whole, timeout_s=TIMEOUT_S)

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


@pytest.mark.processes
def test_two_nodes_ranks_are_numbered_through_and_meet(job: Job) -> None:
    job.write(REPORT, "import torch.distributed as dist\n", 'dist.init_process_group("gloo")\n')
    with (job.folder / "job.py").open("a") as file:
        file.write("assert dist.get_world_size() == 4\ndist.barrier()\n")
        file.write("dist.destroy_process_group()\n")
    nodes = ["--nproc=2", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    for done in job.run_nodes(2, *nodes, "../job.py"):
        assert done.returncode == 0, done.stderr
    assert job.ranks() == [0, 1, 2, 3]
    assert [job.report(rank)["env"]["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    # Ranks without output leave no file, on either node.
    assert list(job.folder.rglob("*.log")) == []


def test_processes_default_is_gpus_or_else_cores(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(REPORT)
    monkeypatch.chdir(job.folder)
    monkeypatch.setattr(multiproc, "_cores", lambda: 6)
    for gpus, processes in (8, 8), (0, 6):
        monkeypatch.setattr(multiproc.cuda, "device_count", lambda gpus=gpus: gpus)
        assert multiproc.parse(["job.py"], {}).nproc == processes


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
def test_options_script_takes_them_each_rank_gets_its_own(job: Job) -> None:
    job.write(REPORT, TAKES_ALL)
    done = job.run("--nproc=2", "job.py", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        expected = ["--rank", str(rank), "--world-size", "2", "--local_rank", str(rank)]
        assert job.report(rank)["argv"] == ["--lr", "0.1", *expected]


@pytest.mark.processes
def test_options_script_takes_none_gets_its_arguments_alone(job: Job) -> None:
    job.write(REPORT)
    # The agent substitutes ${local_rank} and $$ in its arguments. These must arrive unchanged.
    arguments = ["--name", "a b", "$$x", "${local_rank}", "--", "--nproc=7"]
    done = job.run("--nproc=2", "job.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert job.report(0)["argv"] == job.report(1)["argv"] == arguments


@pytest.mark.processes
def test_options_are_inserted_before_a_double_dash(job: Job) -> None:
    job.write(REPORT, TAKES_ALL)
    done = job.run("--nproc=1", "job.py", "--lr=1", "--", "--world-size", "--rank=7")
    assert done.returncode == 0, done.stderr
    options = ["--lr=1", "--rank", "0", "--world-size", "1", "--local_rank", "0"]
    assert job.report(0)["argv"] == [*options, "--", "--world-size", "--rank=7"]


@pytest.mark.processes
def test_world_size_of_script_is_the_number_of_processes(job: Job) -> None:
    job.write(REPORT, TAKES_ALL)
    done = job.run("job.py", "--world-size", "3", "--lr=1")
    assert done.returncode == 0, done.stderr
    assert job.ranks() == [0, 1, 2]
    expected = ["--world-size", "3", "--lr=1", "--rank", "2", "--local_rank", "2"]
    assert job.report(2)["argv"] == expected


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("p.add_argument('--local_rank', default=-1)", {"--local_rank"}),
        ("p.add_argument('-r', '--rank')", {"--rank"}),
        ("a.b().add_argument(\n  '--world_size')", {"--world_size"}),
        ("p.add_argument('--local-rank', '--local_rank')", {"--local-rank", "--local_rank"}),
        ("# p.add_argument('--rank')", set()),
        ("print('--rank')", set()),
        ("p.add_argument('--ranking')", set()),
        ("this is no python", set()),
        ("x = " + "-" * 9999 + "1", set()),  # too deep for ast.parse()
    ],
)
def test_options_taken_source_is_read(tmp_path: Path, source: str, options: set[str]) -> None:
    (tmp_path / "script.py").write_text(source)
    assert set(multiproc.options_taken(tmp_path / "script.py")) == options


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        (["--rank", "--local_rank"], [], ("--rank", "--local_rank")),
        (["--local_rank", "--local-rank"], [], ("--local_rank",)),
        (["--local-rank"], [], ("--local-rank",)),
        (["--rank"], ["--rank", "5"], ()),
        (["--rank"], ["--rank=5"], ()),
        (["--local_rank"], ["--local-rank=0"], ()),
        ([], [], ()),
    ],
)
def test_appended_one_option_per_value_that_is_not_given(
    options: list[str], arguments: list[str], expected: tuple[str, ...]
) -> None:
    assert multiproc.appended(options, arguments) == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ([], ("--rank", "--world-size", "--local_rank")),
        (["--append=none"], ()),
        (["--append=local-rank,rank"], ("--local-rank", "--rank")),
    ],
)
def test_append_choice_wins_over_the_source(
    job: Job, monkeypatch: pytest.MonkeyPatch, choice: list[str], expected: tuple[str, ...]
) -> None:
    job.write(TAKES_ALL)
    monkeypatch.chdir(job.folder)
    assert multiproc.parse([*choice, "job.py"], {}).append == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--world-size", "4", "x"], 4),
        (["--world_size=4", "x"], 4),
        (["a", "--world-size", "4", "--world_size", "5"], 5),
        (["--world-size", "many"], None),
        (["--world-size"], None),
        (["--world-size=4x"], None),
        (["my--world-size=4"], None),
        ([], None),
    ],
)
def test_world_size_is_found_in_every_spelling(arguments: list[str], expected: int | None) -> None:
    assert multiproc.world_size(arguments) == expected


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
def test_failing_rank_with_a_long_line_only_its_end_is_shown(job: Job) -> None:
    job.write(
        "import os, sys\n",
        'print("x" * 1_000_000, "the end")\n',
        'sys.exit(3 * int(os.environ["RANK"]))\n',
    )
    done = job.run("--nproc=2", "job.py")
    assert done.returncode == 3
    assert "x the end\n" in done.stderr
    assert len(done.stderr) < 100_000


@pytest.mark.processes
@linux_only
def test_stopped_launcher_leaves_no_process(job: Job) -> None:
    job.write(MEET, WAIT)
    launcher = job.start("--nproc=2", "job.py")
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "all here\n"
    launcher.send_signal(signal.SIGTERM)
    assert job.finish(launcher).returncode == 128 + signal.SIGTERM
    assert job.outlive() == []


@pytest.mark.processes
@linux_only
def test_killed_launcher_leaves_no_rank(job: Job) -> None:
    job.write(MEET, WAIT)
    launcher = job.start("--nproc=2", "job.py")
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "all here\n"
    launcher.kill()
    job.finish(launcher)  # returns when rank 0 has closed the pipe
    assert job.outlive() == []


# --- refused arguments ---


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--nproc=0", "job.py"], "--nproc and --timeout-s are at least 1"),
        (["--nproc=two", "job.py"], "--nproc-per-node/--nproc_per_node: invalid int value: 'two'"),
        (["--node-rank=x", "job.py"], "invalid int value: 'x'"),
        (["--master-port=x", "job.py"], "'x' is not a port number"),
        (["-m", "job"], "unrecognized arguments: -m"),
        (["-m"], "the following arguments are required: script"),
        (["--master-port=70000", "job.py"], "'70000' is not a port number"),
        (["--append=ranks", "job.py"], "--append takes rank, world-size, local_rank"),
        (["--nnodes=2", "job.py"], "several nodes need the --master-addr of node 0"),
        (["--nnodes=0", "job.py"], "--node-rank is 0 to --nnodes - 1"),
        (["--node-rank=1", "job.py"], "--node-rank is 0 to --nnodes - 1"),
        (["--nproc=2", "job.py", "--world-size", "3"], "--world-size is not --nproc x --nnodes"),
        (["job.py", "--world-size=0"], "--world-size is not --nproc x --nnodes"),
    ],
)
def test_bad_argument_fails_with_one_sentence(
    arguments: list[str],
    complaint: str,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(job.folder)
    job.write(REPORT)
    with pytest.raises(SystemExit) as stopped:
        multiproc.parse(arguments, {})
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_several_nodes_environment_gives_the_meeting_point(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.folder)
    job.write(REPORT)
    there = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}

    def master(*arguments: str, env: dict[str, str] = there) -> tuple[str | None, str]:
        args = multiproc.parse(arguments, env)
        return args.master_addr, args.master_port

    assert master("--nnodes=2", "job.py") == ("node0", "1234")
    assert master("--nnodes=2", "--master-port=99", "job.py") == ("node0", "99")
    assert master("--nnodes=2", "--master-addr=b", "job.py", env={}) == ("b", "29500")
    assert master("job.py") == (None, "0")  # any free port
    assert multiproc.parse(["--nnodes=2", "job.py", "--world-size=6"], there).nproc == 3
