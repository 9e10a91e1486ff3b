# SPDX-License-Identifier: BSD-3-Clause
"""examples/mnist/main.py under each launcher, compared with its README."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.distributed.launch
import torch.distributed.run
import warm
from ddp_support import free_port, require
from warm import run_script, run_script_on_ranks

require("sklearn", "tqdm")

MAIN = Path(__file__).resolve().parents[2] / "examples" / "mnist" / "main.py"
RANKS = ["--standalone", "--local-addr=localhost", "--nproc_per_node=2"]
#: Commands that start new processes.
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", *RANKS],
}
#: With ranks that are forked.
TWO_RANKS = {"torchrun": torch.distributed.run, "launch": torch.distributed.launch}
Job = subprocess.Popen[str] | warm.Popen
#: One launcher trains to the end. The others train long enough to show that they do the same.
EPOCHS = {"torchrun": 30, "python": 5, "launch": 5}
#: The minimum test accuracy in percent after this number of epochs. Measured after five: 79.7.
ACCURACY = {30: 97.0, 5: 75.0}
#: Steps of one epoch.
STEPS = 23
# Only a guard against hangs. Nothing here takes nearly this long.
TIMEOUT_S = 600

pytestmark = pytest.mark.processes


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without variables of a launcher."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


def start(launcher: str, *args: object, **env: str) -> subprocess.Popen[str]:
    # The ranks inherit the pipes, so end of file means that no process of the job is left.
    return subprocess.Popen(
        [*LAUNCHERS[launcher], str(MAIN), "--no-cuda", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**env),
    )


def start_forked(launcher: str, folder: Path, *args: object, **env: str) -> warm.Popen:
    """The launcher and its ranks, forked with torch imported (see warm)."""
    arguments = [*RANKS, str(MAIN), "--no-cuda", *map(str, args)]
    place = {"cwd": folder, "env": environment(**env)}
    return warm.Popen(TWO_RANKS[launcher].__file__, *arguments, **place, forks_ranks=True)


def finish(process: Job) -> subprocess.CompletedProcess[str]:
    """Wait until every process of the job has ended."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for pid in [*children(process.pid), process.pid]:
            os.kill(pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended in the meantime
            found += map(int, task.read_text().split())
    return found


def run(launcher: str, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    return finish(start(launcher, *args, **env))


def run_forked(
    ranks: int, folder: Path, *args: object, **env: str
) -> subprocess.CompletedProcess[str]:
    """Without a launcher if there are 0 ranks. Forked with torch imported (see warm)."""
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if ranks else {}
    place = {"cwd": folder, "env": environment(**port, **env), "timeout_s": TIMEOUT_S}
    arguments = ("--no-cuda", *map(str, args))
    if ranks:
        return run_script_on_ranks(ranks, MAIN, *arguments, **place)
    return run_script(MAIN, *arguments, **place)


def only_complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The single sentence on stderr of a one-process run that refuses its arguments."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("main.py: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


class Trained(NamedTuple):
    stdout: str
    stderr: str
    losses: list[float]
    checkpoint: dict


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """The default job under one launcher, run once for all tests.

    Only torchrun runs all epochs, and only its ranks are new processes.
    """
    known: dict[str, Trained] = {}

    def get(launcher: str) -> Trained:
        if launcher not in known:
            folder = tmp_path_factory.mktemp(launcher)
            log, checkpoint = folder / "losses.json", folder / "checkpoint.pt"
            arguments = ["--loss-log", log, "--save", checkpoint]
            if launcher != "torchrun":
                arguments.append(f"--epochs={EPOCHS[launcher]}")
            if launcher == "python":
                done = run_forked(0, folder, *arguments)
            elif launcher == "launch":
                done = finish(start_forked(launcher, folder, *arguments))
            else:
                done = run(launcher, *arguments)
            assert done.returncode == 0, done.stderr
            losses = json.loads(log.read_text())["losses"]
            known[launcher] = Trained(done.stdout, done.stderr, losses, torch.load(checkpoint))
        return known[launcher]

    return get


@pytest.fixture(scope="module")
def main_module() -> Iterator[ModuleType]:
    """main.py as a module, for tests that need no separate process."""
    spec = importlib.util.spec_from_file_location("mnist_main", MAIN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mnist_main"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mnist_main"]


def final_line(stdout: str) -> str:
    lines = stdout.strip().splitlines()
    assert lines[-1].startswith("final: ")
    return lines[-1]


@pytest.mark.parametrize("launcher", EPOCHS)
def test_digits_run_reaches_its_accuracy(launcher: str, trained: Callable[[str], Trained]) -> None:
    line = final_line(trained(launcher).stdout)
    match = re.fullmatch(
        r"final: test accuracy (\d+\.\d\d) %, trained \d+\.\d s, \d+ samples/s, .*", line
    )
    assert match, line
    assert float(match[1]) >= ACCURACY[EPOCHS[launcher]]


@pytest.mark.parametrize("launcher", EPOCHS)
def test_digits_every_epoch_tests_each_sample_once(
    launcher: str, trained: Callable[[str], Trained]
) -> None:
    count = EPOCHS[launcher]
    line = rf"^epoch \d+/{count}: .* of (\d+)\)$"
    assert re.findall(line, trained(launcher).stdout, re.MULTILINE) == ["360"] * count


@pytest.mark.parametrize("launcher", TWO_RANKS)
def test_two_ranks_end_with_bitwise_equal_parameters(
    launcher: str, trained: Callable[[str], Trained]
) -> None:
    line = final_line(trained(launcher).stdout)
    assert line.endswith(", 2 ranks (gloo), parameters bitwise equal")


@pytest.mark.parametrize("launcher", TWO_RANKS)
def test_two_ranks_loss_curve_equals_one_process(
    launcher: str, trained: Callable[[str], Trained]
) -> None:
    # Measured over 30 epochs: a relative difference of at most 8e-6, on the last losses.
    one, two = trained("python").losses, trained(launcher).losses
    assert len(one) == EPOCHS["python"] * STEPS
    assert len(two) == EPOCHS[launcher] * STEPS
    assert two[: len(one)] == pytest.approx(one, rel=1e-4)
    assert two[:20] == pytest.approx(one[:20], rel=1e-6)


def test_two_launchers_give_the_same_bits(trained: Callable[[str], Trained]) -> None:
    short = trained("launch").losses
    assert trained("torchrun").losses[: len(short)] == short


def same_bits(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other


@pytest.mark.parametrize(("launcher", "ranks"), [("python", 0), ("torchrun", 2)])
def test_resume_continues_exactly(
    launcher: str, ranks: int, trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    log, half, resumed, whole = (tmp_path / name for name in ("losses", "half", "resumed", "whole"))

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        return run_forked(ranks, tmp_path, *args)

    assert run("--epochs=1", "--save", half).returncode == 0
    done = run("--epochs=2", "--resume", half, "--save", resumed, "--loss-log", log)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 2/2: ")
    assert run("--epochs=2", "--save", whole).returncode == 0
    assert same_bits(torch.load(resumed), torch.load(whole))
    assert not same_bits(torch.load(half), torch.load(whole))
    assert json.loads(log.read_text())["losses"] == trained(launcher).losses[STEPS : 2 * STEPS]


def test_resume_of_finished_run_only_tests(
    trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    path = tmp_path / "done.pt"
    torch.save(trained("python").checkpoint, path)
    epochs = f"--epochs={EPOCHS['python']}"
    line = final_line(run_forked(0, tmp_path, "--resume", path, epochs).stdout)
    assert line.split(",")[0] == final_line(trained("python").stdout).split(",")[0]
    assert "nothing left to train" in line


def test_only_rank_0_prints_and_no_bar_into_files(tmp_path: Path) -> None:
    done = run_forked(2, tmp_path, "--epochs=1")
    assert done.returncode == 0, done.stderr
    assert "final: " in done.stdout
    assert "epoch 1/1: " not in done.stderr
    assert (tmp_path / "rank_1.log").read_text() == ""


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("--dataset=letters", "invalid choice: 'letters'"),
        ("--batch-size=0", "0 is not a positive number"),
        ("--save=/nowhere/at/all.pt", "cannot write to /nowhere/at/all.pt"),
        ("--loss-log=/", "cannot write to /:"),
    ],
)
def test_bad_argument_fails_with_one_sentence(
    argument: str, complaint: str, main_module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main_module.parse_args([argument])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_resume_without_checkpoint_fails_with_one_sentence(tmp_path: Path) -> None:
    complaint = only_complaint(run_forked(0, tmp_path, "--resume=/nowhere.pt"))
    assert "there is no checkpoint /nowhere.pt" in complaint


def test_resume_with_other_settings_fails_with_one_sentence(
    trained: Callable[[str], Trained], tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save(trained("python").checkpoint, path)
    complaint = only_complaint(run_forked(0, tmp_path, "--resume", path, "--batch-size=32"))
    assert "was trained with --batch-size 64, not 32" in complaint


def test_batch_smaller_than_world_fails_on_every_rank(tmp_path: Path) -> None:
    done = run_forked(2, tmp_path, "--batch-size=1")
    assert done.returncode != 0
    # The later rank may have been killed before it could report it.
    said = done.stderr + (tmp_path / "rank_1.log").read_text()
    assert "a global --batch-size of 1 leaves some of the 2 ranks without samples" in said


FAKE_TORCHVISION = '''
import pathlib
import torch

class MNIST:
    """Ten images per digit, each a bright bar at a height of its own."""

    def __init__(self, root, train=True, download=False):
        marker = pathlib.Path(root) / "downloads"
        if download:
            with marker.open("a") as file:
                file.write("x")
        if not marker.exists():
            raise RuntimeError("Dataset not found.")
        self.targets = torch.arange(10).repeat(10)
        self.data = torch.zeros(100, 28, 28, dtype=torch.uint8)
        for image, digit in zip(self.data, self.targets):
            image[2 * digit + 4] = 255
'''


def fake_torchvision(folder: Path) -> dict[str, str]:
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").touch()
    (folder / "torchvision" / "datasets.py").write_text(FAKE_TORCHVISION)
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{path}" if path else str(folder)}


def test_mnist_two_ranks_download_once_and_train(tmp_path: Path) -> None:
    env = fake_torchvision(tmp_path)
    args = ["--dataset=mnist", "--download", "--epochs=2", f"--data-dir={tmp_path}"]
    done = run_forked(2, tmp_path, *args, **env)
    assert done.returncode == 0, done.stderr
    assert " of 100)" in done.stdout
    assert (tmp_path / "downloads").read_text() == "x"


def test_mnist_missing_data_fails_with_one_sentence(tmp_path: Path) -> None:
    env = fake_torchvision(tmp_path)
    done = run_forked(0, tmp_path, "--dataset=mnist", f"--data-dir={tmp_path}", **env)
    assert f"MNIST is not in {tmp_path}: run again with --download" in only_complaint(done)


def test_mnist_without_torchvision_fails_with_one_sentence(tmp_path: Path) -> None:
    env = fake_torchvision(tmp_path)
    (tmp_path / "torchvision" / "datasets.py").write_text("raise ImportError('none here')\n")
    done = run_forked(0, tmp_path, "--dataset=mnist", **env)
    assert "--dataset mnist needs torchvision" in only_complaint(done)


@pytest.mark.parametrize("spelling", ["--local-rank=3", "--local_rank=3", "LOCAL_RANK"])
def test_local_rank_every_spelling_is_understood(
    spelling: str, main_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main_module.parse_args([]).local_rank == 0
    if spelling == "LOCAL_RANK":
        monkeypatch.setenv("LOCAL_RANK", "3")
        assert main_module.parse_args([]).local_rank == 3
    else:
        assert main_module.parse_args([spelling]).local_rank == 3


def start_endless(launcher: str, folder: Path) -> Job:
    """A job that has trained one epoch, on data that does not need scikit-learn."""
    env = fake_torchvision(folder)
    endless = ("--dataset=mnist", "--download", f"--data-dir={folder}", "--epochs=1000000")
    job: Job = (
        start(launcher, *endless, **env)
        if launcher == "python"
        else start_forked(launcher, folder, *endless, **env)
    )
    assert job.stdout is not None
    assert job.stdout.readline().startswith("epoch 1/")
    return job


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_interrupt_stops_every_process(launcher: str, tmp_path: Path) -> None:
    job = start_endless(launcher, tmp_path)
    job.send_signal(signal.SIGINT)
    done = finish(job)
    assert done.returncode != 0
    if launcher == "torchrun":
        # The agent forwards the signal. If the signal arrives between two lines of the agent's own
        # timer, it ends its processes by SIGTERM instead (torch 2.13's metrics.prof:
        # UnboundLocalError).
        assert re.search(r"main\.py: stopped by SIG(INT|TERM)\.", done.stderr)
    else:
        assert "main.py: stopped by SIGINT." in done.stderr
        assert done.returncode == 128 + signal.SIGINT
        assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the ranks through /proc")
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_stops_the_others(victim: int, tmp_path: Path) -> None:
    job = start_endless("torchrun", tmp_path)
    os.kill(sorted(children(job.pid))[victim], signal.SIGKILL)
    assert finish(job).returncode != 0


@pytest.mark.cuda
@pytest.mark.nccl
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_digits_one_rank_per_gpu_reaches_97_percent() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={torch.cuda.device_count()}", str(MAIN)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    line = final_line(done.stdout)
    assert "(nccl), parameters bitwise equal" in line
    assert float(line.split()[3]) >= 97.0
