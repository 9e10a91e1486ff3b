# SPDX-License-Identifier: BSD-3-Clause
"""python -m apex.parallel.multiproc: its processes, the scripts' arguments, and the end of a
job."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed.run as torchrun
from ddp_support import free_port
from warm import run_script

from apex.parallel import multiproc
from apex.parallel._multiproc import script as script_options

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
def test_master_given_reaches_every_rank(job: Job) -> None:
    job.write(REPORT)
    port = str(free_port())
    done = job.run("--nproc=2", "--master-addr=127.0.0.1", f"--master-port={port}", "job.py")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        env = job.report(rank)["env"]
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", port)


@pytest.mark.processes
def test_two_nodes_ranks_are_numbered_through_and_meet(job: Job) -> None:
    job.write(REPORT, "import torch.distributed as dist\n", 'dist.init_process_group("gloo")\n')
    with (job.folder / "job.py").open("a") as file:
        file.write("assert dist.get_world_size() == 4\ndist.barrier()\n")
        file.write("dist.destroy_process_group()\n")
    nodes = ["--nproc=2", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    for done in job.run_nodes(2, *nodes, "../job.py"):
        assert done.returncode == 0, done.stderr
        assert "recvValue" not in done.stderr  # the store ends after the last node has left it
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
def test_several_launchers_in_one_folder_do_not_collide(job: Job) -> None:
    meet = MEET.replace('os.environ["RANK"]', '(os.environ["JOB"] + os.environ["RANK"])')
    job.write(meet.replace('int(os.environ["WORLD_SIZE"])', "4"), 'print(os.environ["JOB"])\n')
    launchers = [job.start("--nproc=2", "job.py", JOB=name) for name in "ab"]
    for launcher, name in zip(launchers, "ab", strict=True):
        done = job.finish(launcher)
        assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr
    assert set((job.folder / "rank_1.log").read_text().split()) == {"a", "b"}


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["job.py", "--", "--flag"],
        ["job.py", "--", "--", "--flag"],
        ["job.py", "--flag", "--", "x", "--nnodes=7"],
        ["job.py", "--"],
        ["--", "job.py", "--flag"],
    ],
)
def test_arguments_double_dash_is_what_torchrun_makes_of_it(
    job: Job, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    job.write(REPORT)
    monkeypatch.chdir(job.folder)
    ours = multiproc.parse(["--nproc=1", *arguments], {})
    theirs = torchrun.parse_args(["--nproc-per-node=1", *arguments])
    assert ours.arguments == theirs.training_script_args
    assert (str(ours.script), ours.nnodes) == (theirs.training_script, int(theirs.nnodes[0]))


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
    assert set(script_options.options_taken(tmp_path / "script.py")) == options


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        (["--rank", "--local_rank"], [], ("--rank", "--local_rank")),
        (["--local_rank", "--local-rank"], [], ("--local_rank",)),
        (["--local-rank"], [], ("--local-rank",)),
        (["--rank"], ["--rank", "5"], ()),
        (["--rank"], ["--rank=5"], ()),
        (["--local_rank"], ["--local-rank=0"], ()),
        (["--rank"], ["--", "--rank=5"], ("--rank",)),
        ([], [], ()),
    ],
)
def test_appended_one_option_per_value_that_is_not_given(
    options: list[str], arguments: list[str], expected: tuple[str, ...]
) -> None:
    assert script_options.appended(options, arguments) == expected


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
        (["--world-size", "4", "--", "--world-size=5"], 4),
        (["--", "--world-size=5"], None),
        ([], None),
    ],
)
def test_world_size_is_found_in_every_spelling(arguments: list[str], expected: int | None) -> None:
    assert script_options.world_size(arguments) == expected


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
        ("kill", 137, "failed with signal SIGKILL", {"HANDLES_SIGTERM": "0"}),
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
def test_failing_ranks_each_is_named_with_its_traceback(job: Job) -> None:
    job.write('import os\nraise ValueError("fault of " + os.environ["RANK"])\n')
    done = job.run("--nproc=1", "job.py")
    assert done.returncode == 1
    assert "ValueError: fault of 0" in done.stderr
    assert "multiproc: rank 0 failed with exit code 1; see above\n" in done.stderr


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


def test_signal_without_a_name_is_reported_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    logs = multiproc.RankLogs()
    logs.files = {}
    failure = multiproc.ProcessFailure(local_rank=0, pid=1, exitcode=-40, error_file="")
    assert multiproc._report({0: failure}, [0], logs) == 168
    assert capsys.readouterr().err == "multiproc: rank 0 failed with signal 40; see above\n"


#: The launcher, whose stderr has no reader.
UNREAD = """
    import os, sys
    from apex.parallel import multiproc
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    sys.exit(multiproc.main())
"""
#: The launcher as nohup starts it.
NOHUP = """
    import signal, sys
    from apex.parallel import multiproc
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.exit(multiproc.main())
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("launcher", "source", "code"),
    [
        (UNREAD, "sys.exit(7)\n", 7),
        (NOHUP, "os.kill(os.getppid(), signal.SIGHUP)\n", 0),
    ],
    ids=["stderr without a reader", "nohup"],
)
def test_terminal_that_is_closed_does_not_change_the_exit_code(
    job: Job, launcher: str, source: str, code: int
) -> None:
    job.write("import os, signal, sys\n", source)
    script = job.folder / "launcher.py"
    script.write_text(textwrap.dedent(launcher))
    whole = job.environment()
    done = run_script(script, "--nproc=1", "job.py", cwd=job.folder, env=whole, timeout_s=TIMEOUT_S)
    assert done.returncode == code, done.stderr


def test_second_signal_shortens_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(
        multiproc.LocalElasticAgent, "_shutdown", lambda _self, _signal, wait: waits.append(wait)
    )
    agent = object.__new__(multiproc.Agent)
    agent._shutdown()
    agent._shutdown()
    assert waits == [30, 1]


@pytest.mark.processes
@linux_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_launcher_leaves_no_process(job: Job, number: signal.Signals) -> None:
    # A rank may have its own processes, in a separate session.
    job.write(
        "import subprocess, sys\n",
        'sleeper = "import time; time.sleep(1000)"\n',
        "subprocess.Popen([sys.executable, '-c', sleeper], start_new_session=True)\n",
        MEET_IN_GROUP if number == signal.SIGINT else MEET,
        WAIT,
    )
    launcher = job.start("--nproc=2", "job.py")
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "all here\n"
    assert len(job.living()) == 5
    launcher.send_signal(number)
    done = job.finish(launcher)
    assert done.returncode == 128 + number
    assert f"multiproc: stopped by {number.name}" in done.stderr
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


@pytest.mark.processes
@linux_only
@pytest.mark.parametrize("killed", [0, 1])
def test_killed_launcher_of_a_node_leaves_no_rank_there(job: Job, killed: int) -> None:
    """Node 1 stops when node 0's launcher ends. Node 0's ranks would notice that a peer is lost."""
    job.write(MEET, WAIT)
    nodes = ["--nproc=2", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    launchers = [
        job.start(*nodes, f"--node-rank={node}", f"--log-dir=logs_{node}", "job.py")
        for node in (0, 1)
    ]
    assert launchers[0].stdout is not None
    assert launchers[0].stdout.readline() == "all here\n"
    assert len(job.living()) == 6
    launchers[killed].kill()
    done = job.finish(launchers[1])
    if killed == 0:
        assert (done.returncode, job.outlive()) == (1, [])
        assert "multiproc: node 1: node 0 has failed;" in done.stderr
    else:
        assert len(job.outlive(3)) == 3 and launchers[0].poll() is None
        launchers[0].kill()
        job.finish(launchers[0])


@pytest.mark.processes
@linux_only
@pytest.mark.parametrize("failing", [0, 1])
def test_failing_node_stops_the_other(job: Job, failing: int) -> None:
    job.write(MEET, FAIL)
    nodes = ["--nproc=1", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    ends = job.run_nodes(2, *nodes, "../job.py", "raise", FAILING_RANK=str(failing))
    assert [done.returncode for done in ends] == [1, 1]
    assert "ValueError: no more apples" in ends[failing].stderr
    assert f"multiproc: node {1 - failing}: node {failing} has failed;" in ends[1 - failing].stderr
    assert job.living() == []


#: Rank 1 fails when node 0's launcher has reaped rank 0.
FAILS_AFTER_NODE_0 = """
    import os, pathlib, sys, time
    place = pathlib.Path(os.environ["REPORT_TO"], "0")
    if os.environ["RANK"] == "0":
        place.with_suffix(".new").write_text(str(os.getpid()))
        place.with_suffix(".new").rename(place)
        sys.exit()
    while not place.exists() or pathlib.Path("/proc", place.read_text()).exists():
        time.sleep(0.01)
    sys.exit(5)
"""


@pytest.mark.processes
@linux_only
def test_failing_node_stops_a_node_that_has_finished(job: Job) -> None:
    job.write(FAILS_AFTER_NODE_0)
    nodes = ["--nproc=1", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    ends = job.run_nodes(2, *nodes, "../job.py")
    assert [done.returncode for done in ends] == [1, 5]
    assert "multiproc: node 0: node 1 has failed;" in ends[0].stderr


# Hazard: the store ends with node 0's launcher, and later requests to it report a failure.
OUTLIVES_NODE_0 = """
    import os, socket, sys, time
    while os.environ["GROUP_RANK"] == "1":
        try:
            socket.create_connection(("127.0.0.1", int(sys.argv[1]))).close()
        except OSError:
            time.sleep(1)  # the launcher looks ten times
            break
        time.sleep(0.1)
    print("done")
"""
IMPATIENT = """
import functools, sys
from apex.parallel import multiproc
multiproc.Agent = functools.partial(multiproc.Agent, exit_barrier_timeout=0.5)
sys.exit(multiproc.main())
"""


@pytest.mark.processes
@linux_only
def test_node_that_works_longer_than_node_0_waits_ends_well(job: Job) -> None:
    job.write(OUTLIVES_NODE_0)
    port = str(free_port())
    nodes = ["--nproc=1", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    for node in (0, 1):
        logs = f"--log-dir=logs_{node}"
        command = [sys.executable, "-c", IMPATIENT, *nodes, logs, f"--node-rank={node}"]
        command += ["job.py", port]
        job.launchers.append(
            subprocess.Popen(command, cwd=job.folder, env=job.environment(), text=True)
        )
    assert [job.finish(launcher).returncode for launcher in job.launchers] == [0, 0]
    assert (job.folder / "logs_1" / "rank_1.log").read_text() == "done\n"


@pytest.mark.processes
@pytest.mark.parametrize("node_rank", [0, 1])
def test_missing_node_fails_when_time_is_up(job: Job, node_rank: int) -> None:
    job.write(REPORT)
    nodes = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    done = job.run("--nproc=1", *nodes, f"--node-rank={node_rank}", "--timeout-s=1", "job.py")
    assert done.returncode == 1
    assert re.search(rf"multiproc: node {node_rank}: .*[Tt]imed out", done.stderr.splitlines()[-1])
    assert job.ranks() == []


@pytest.mark.processes
def test_interrupt_while_nodes_are_missing_ends_the_launcher(job: Job) -> None:
    job.write(REPORT)
    port = free_port()
    nodes = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    launcher = job.start("--nproc=1", *nodes, "job.py")
    while True:  # until it listens
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            assert launcher.poll() is None
            time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    assert job.finish(launcher).returncode == -signal.SIGINT


@pytest.mark.processes
def test_port_that_is_taken_is_named(job: Job) -> None:
    job.write(REPORT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = job.run("--nproc=1", f"--master-port={port}", "job.py")
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert re.search(rf"multiproc: node 0: .* port: {port},.*EADDRINUSE", said), said
    assert job.ranks() == []


@pytest.mark.processes
@linux_only
def test_log_that_cannot_be_opened_is_named_and_no_rank_is_left(job: Job) -> None:
    job.write(WAIT)
    (job.folder / "rank_1.log").mkdir()
    done = job.run("--nproc=2", "job.py")
    assert done.returncode == 1
    assert "Is a directory: 'rank_1.log'" in done.stderr.splitlines()[-1]
    assert job.living() == []


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
