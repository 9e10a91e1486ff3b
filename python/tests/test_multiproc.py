# SPDX-License-Identifier: BSD-3-Clause
"""python -m apex.parallel.multiproc: what it starts, what scripts are given, and how a job ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ddp_support import free_port
from torch import distributed as dist
from warm import run_script

from apex.parallel import multiproc
from apex.parallel._multiproc import nodes as other_nodes
from apex.parallel._multiproc import script as script_options

# Against hangs only; nothing here takes nearly as long.
TIMEOUT_S = 600

linux_only = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc"
)

#: Every rank tells what it was given, as one line of JSON in a file of its own.
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
    parser.parse_args()
"""
#: All ranks have started when this is done.
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
#: Every rank waits until the launcher ends it; rank 0 says when all of them are there.
WAIT = """
    import os, signal
    if os.environ["RANK"] == "0":
        print("all here", flush=True)
    while True:
        signal.pause()
"""
#: This rank fails, the others wait until they are stopped: by the signal itself, as most scripts
#: are, or by a handler of their own.
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
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        signal.pause()
"""


class Job:
    """A launcher in a folder of its own, and what its ranks said."""

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
            "TMPDIR": str(self.folder),  # a launcher that is killed leaves its folder behind
            **env,
        }

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        # The ranks inherit the pipes: at their end, no process of the job is left.
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
        """The launcher is forked from a process that has imported torch: see warm."""
        return self._run(self.folder, command, env)

    def run_nodes(
        self, nodes: int, *command: str, **env: str
    ) -> list[subprocess.CompletedProcess[str]]:
        """Launchers of one job, each with its --node-rank and in a folder of its own."""

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
        """Wait until the launcher and whatever has its output open are gone."""
        out, err = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def report(self, rank: int) -> dict:
        return json.loads((self.reports / str(rank)).read_text())

    def ranks(self) -> list[int]:
        return sorted(int(path.name) for path in self.reports.iterdir())

    def living(self) -> list[int]:
        """Processes that were started with this folder in their environment, zombies apart."""
        mark = f"REPORT_TO={self.reports}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
            except OSError:
                continue
        return found

    def outlive(self, limit_s: float = 60) -> list[int]:
        """Those of :meth:`living` that do not end; the kernel ends one process before another."""
        deadline = time.monotonic() + limit_s
        while (found := self.living()) and time.monotonic() < deadline:
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


# --- what is started ---


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
    assert job.ranks() == [0, 1, 2, 3]
    assert [job.report(rank)["env"]["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    # Ranks that have said nothing leave no file behind, on either node.
    assert list(job.folder.rglob("*.log")) == []


def test_processes_default_is_gpus_or_else_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiproc.torch.cuda, "device_count", lambda: 8)
    assert multiproc.default_processes() == 8
    monkeypatch.setattr(multiproc.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(multiproc, "_cores", lambda: 6)
    assert multiproc.default_processes() == 6


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


# --- what scripts are given ---


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
    # The agent substitutes ${local_rank} and $$ in what it is given; these must arrive untouched.
    arguments = ["--name", "a b", "$$x", "${local_rank}", "--", "--nproc=7"]
    done = job.run("--nproc=2", "job.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert job.report(0)["argv"] == job.report(1)["argv"] == arguments


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
    ],
)
def test_options_taken_source_is_read(tmp_path: Path, source: str, options: set[str]) -> None:
    (tmp_path / "script.py").write_text(source)
    assert script_options.options_taken(tmp_path / "script.py") == options


@pytest.mark.parametrize(
    ("takes", "arguments", "choice", "expected"),
    [
        ({"--rank", "--local_rank"}, [], None, ("--rank", "--local_rank")),
        ({"--local-rank", "--local_rank"}, [], None, ("--local_rank",)),
        ({"--rank"}, ["--rank", "5"], None, ()),
        ({"--rank"}, ["--rank=5"], None, ()),
        ({"--rank", "--world-size"}, [], (), ()),
        (set(), [], ("--local_rank",), ("--local_rank",)),
        (set(), ["--local-rank=0"], ("--local_rank",), ()),
    ],
)
def test_appended_choice_and_given_options_win(
    takes: set[str], arguments: list[str], choice: tuple[str, ...] | None, expected: tuple[str, ...]
) -> None:
    assert script_options.appended(frozenset(takes), arguments, choice) == expected


@pytest.mark.parametrize(
    ("arguments", "keep", "expected"),
    [
        (["--world-size", "4", "x"], False, (["x"], 4)),
        (["--world_size=4", "x"], False, (["x"], 4)),
        (["a", "--world-size", "4"], True, (["a", "--world-size", "4"], 4)),
        (["--world-size", "many"], False, (["--world-size", "many"], None)),
        (["--world-size"], False, (["--world-size"], None)),
        ([], False, ([], None)),
    ],
)
def test_split_world_size_finds_every_spelling(
    arguments: list[str], keep: bool, expected: tuple[list[str], int | None]
) -> None:
    assert script_options.split_world_size(arguments, keep) == expected


# --- how a job ends ---


@pytest.mark.processes
@linux_only
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("how", "code", "complaint", "others"),
    [
        ("raise", 1, "ValueError: no more apples", {}),
        ("7", 7, "failed with exit code 7", {}),
        ("kill", 137, "failed with signal SIGKILL", {}),
        ("kill", 137, "failed with signal SIGKILL", {"HANDLES_SIGTERM": "1"}),
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
    assert (job.folder / "rank_1.log").is_file()  # empty or not: something went wrong
    assert job.living() == []


@pytest.mark.processes
def test_failing_ranks_each_is_named_with_its_traceback(job: Job) -> None:
    job.write('import os\nraise ValueError("fault of " + os.environ["RANK"])\n')
    done = job.run("--nproc=1", "job.py")
    assert done.returncode == 1
    assert "ValueError: fault of 0" in done.stderr
    assert "rank 0 failed with exit code 1; its messages are above." in done.stderr


@pytest.mark.processes
@linux_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_launcher_leaves_no_process(job: Job, number: signal.Signals) -> None:
    # A rank may have processes of its own, in a session of their own.
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
    assert job.living() == []


@pytest.mark.processes
@linux_only
def test_killed_launcher_leaves_no_rank(job: Job) -> None:
    job.write(MEET, WAIT)
    launcher = job.start("--nproc=2", "job.py")
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "all here\n"
    launcher.kill()
    job.finish(launcher)  # returns when rank 0 has let go of the pipe
    assert job.outlive() == []


@pytest.mark.processes
@linux_only
@pytest.mark.parametrize("failing", [0, 1])
def test_failing_node_stops_the_other(job: Job, failing: int) -> None:
    job.write(MEET, FAIL)
    nodes = ["--nproc=1", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    ends = job.run_nodes(2, *nodes, "../job.py", "raise", FAILING_RANK=str(failing))
    assert [done.returncode for done in ends] == [1, 1]
    assert "ValueError: no more apples" in ends[failing].stderr
    assert f"multiproc: node {failing} has failed." in ends[1 - failing].stderr
    assert job.living() == []


@pytest.mark.processes
def test_missing_node_fails_with_one_sentence(job: Job) -> None:
    job.write(REPORT)
    nodes = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    done = job.run("--nproc=1", *nodes, "--node-rank=1", "--timeout-s=1", "job.py")
    assert done.returncode == 1
    assert "multiproc: node 1 could not meet the others: nobody listens at 127.0" in done.stderr
    assert done.stderr.count("\n") == 1
    assert job.ranks() == []


@pytest.mark.processes
def test_missing_node_1_fails_with_one_sentence(job: Job) -> None:
    job.write(REPORT)
    nodes = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    done = job.run("--nproc=1", *nodes, "--timeout-s=1", "job.py")
    assert done.returncode == 1
    assert "multiproc: node 0 could not meet the others at 127.0.0.1:" in done.stderr
    assert job.ranks() == []


@pytest.mark.parametrize("node_rank", [0, 1])
def test_reach_unknown_host_is_tried_again_for_a_while_only(
    node_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, now = [], [0.0]

    def lookup(host: str, port: int, **_: object) -> None:
        tried.append((host, port))
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(other_nodes.socket, "getaddrinfo", lookup)
    monkeypatch.setattr(other_nodes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(other_nodes.time, "sleep", sleep)
    with pytest.raises(other_nodes.NotMet, match="the host 'node0' is unknown .*--master-addr"):
        other_nodes.reach(("node0", 1234), node_rank, timeout_s=600)
    assert len(tried) > 2 and set(tried) == {("node0", 1234)}
    assert now[0] == pytest.approx(other_nodes.RESOLVE_S, abs=1)
    tried.clear()
    with pytest.raises(other_nodes.NotMet):
        other_nodes.reach(("node0", 1234), node_rank, timeout_s=1)
    assert len(tried) == 3  # at 0, 0.5 and 1 s


def test_reach_name_that_cannot_be_one_is_refused_at_once() -> None:
    with pytest.raises(other_nodes.NotMet, match="'a..b' is unknown"):
        other_nodes.reach(("a..b", 1234), 0, timeout_s=600)


def test_reach_node_0_is_connected_to_by_the_others_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        master = ("127.0.0.1", listener.getsockname()[1])
        other_nodes.reach(master, 1, timeout_s=TIMEOUT_S)
        listener.settimeout(TIMEOUT_S)
        listener.accept()[0].close()
    other_nodes.reach(master, 0, timeout_s=1)


@pytest.mark.parametrize(
    ("error", "told"), [(dist.DistNetworkError("no store"), []), (ValueError("a rank"), [1])]
)
def test_watch_tells_the_other_nodes_unless_they_never_met(
    error: Exception, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    monkeypatch.setattr(other_nodes, "_watch", lambda *_: None)
    monkeypatch.setattr(other_nodes, "_tell", lambda master, nodes, rank: heard.append(rank))
    with (
        pytest.raises(type(error)),
        other_nodes.watch(("127.0.0.1", 1), nodes=2, node_rank=1, timeout_s=1),
    ):
        raise error
    assert heard == told


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.py"], "there is no script nowhere.py."),
        (["--nproc=0", "job.py"], "0 is not a positive number"),
        (["--nproc=two", "job.py"], "argument --nproc/--nproc-per-node/--nproc_per_node: 'two' is"),
        (["--node-rank=x", "job.py"], "'x' is not a whole number"),
        (["--master-port=x", "job.py"], "'x' is not a whole number"),
        (["-m", "job"], "unrecognized arguments: -m"),
        (["-m"], "the following arguments are required: script"),
        (["--master-port=70000", "job.py"], "70000 is not a port number"),
        (["--append=ranks", "job.py"], "'ranks' is none of rank, world-size"),
        (["--nnodes=2", "job.py"], "give every one of them the --master-addr of node 0."),
        (["--node-rank=1", "job.py"], "--node-rank 1 is not one of 1 nodes"),
        (["--nproc=2", "job.py", "--world-size", "3"], "is not the script's --world-size 3"),
        (["job.py", "--world-size=0"], "--world-size 0 cannot be divided over 1 node(s)"),
        (["--log-dir=job.py", "job.py"], "cannot make the --log-dir job.py"),
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
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    job.write(REPORT)
    with pytest.raises(SystemExit) as stopped:
        multiproc.main(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert complaint in said and ", ..." not in said


def test_plan_several_nodes_environment_gives_the_meeting_point(
    job: Job, parse: Callable[..., multiproc.Job]
) -> None:
    there = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
    assert parse("--nnodes=2", "job.py", env=there).master == ("node0", 1234)
    assert parse("--nnodes=2", "--master-port=99", "job.py", env=there).master == ("node0", 99)
    assert parse("job.py", env=there).master is None
    assert parse("--nnodes=2", "job.py", "--world-size=6", env=there).processes == 3


@pytest.fixture
def parse(job: Job, monkeypatch: pytest.MonkeyPatch) -> Callable[..., multiproc.Job]:
    monkeypatch.chdir(job.folder)
    job.write(REPORT)

    def planned(*arguments: str, env: dict[str, str]) -> multiproc.Job:
        return multiproc.plan(multiproc.build_parser().parse_args(arguments), env)

    return planned
