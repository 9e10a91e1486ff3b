# SPDX-License-Identifier: BSD-3-Clause
"""The C++ examples, started as by users: torchrun --no-python."""

import os
import re
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from package_support import ROOT, cpp_program, run_torchrun

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
TIMEOUT_S = 600


def run(processes: int, *command: str | Path, cwd: Path) -> str:
    parts = [str(part) for part in command]
    if processes == 1:
        result = subprocess.run(
            parts, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    else:
        result = run_torchrun(processes, *parts, cwd=cwd, env=ENVIRONMENT, timeout_s=TIMEOUT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def mnist(processes: int, cwd: Path, *arguments: str | Path) -> list[tuple[float, float]]:
    """Loss and test accuracy in percent after every epoch, on this number of processes."""
    output = run(processes, cpp_program("cpp", "examples", "mnist", "mnist"), *arguments, cwd=cwd)
    assert "parameters bitwise equal" in output
    lines = re.findall(r"^epoch \d+: loss ([\d.]+), test accuracy ([\d.]+) %$", output, re.M)
    return [(float(loss), float(accuracy)) for loss, accuracy in lines]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """Twelve epochs on two ranks. A shorter run begins with the same values."""
    return mnist(2, tmp_path_factory.mktemp("together"), "--epochs=12")


@pytest.mark.slow
@pytest.mark.processes
def test_mnist_two_ranks_learn_the_digits_as_one_process_does(
    together: list[tuple[float, float]], tmp_path: Path
) -> None:
    alone = mnist(1, tmp_path, "--epochs=12")
    assert alone[-1][1] >= 96
    assert together[-1][1] >= 96
    for (loss, _), (expected, _) in zip(together[:3], alone[:3], strict=True):
        assert loss == pytest.approx(expected, rel=1e-4)


@pytest.mark.processes
def test_mnist_resumed_goes_on_where_it_was_saved(
    together: list[tuple[float, float]], tmp_path: Path
) -> None:
    mnist(2, tmp_path, "--epochs", "2", "--save", tmp_path / "checkpoint")
    rest = mnist(2, tmp_path, "--epochs", "3", "--resume", tmp_path / "checkpoint")
    assert rest == together[2:3]


@pytest.mark.processes
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mnist_mixed_precision_learns_on_other_bits(
    precision: str, together: list[tuple[float, float]], tmp_path: Path
) -> None:
    mixed = mnist(2, tmp_path, "--epochs=4", f"--precision={precision}")
    assert mixed[0] != together[0]  # the flag has an effect
    assert mixed[-1][1] >= 90


def refused(
    code: int, *arguments: str | Path, program: str = "mnist", **popen: Any
) -> subprocess.CompletedProcess[str]:
    """A run that ends with this exit code and one sentence on stderr."""
    command = [str(cpp_program("cpp", "examples", program, program)), *map(str, arguments)]
    env = {k: v for k, v in ENVIRONMENT.items() if k not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, **{"env": env, **popen}
    )
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith(f"{program}: ") and result.stderr.count("\n") == 1
    return result


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        ("mnist", ["--epoks=3"], "there is no option --epoks=3; --help lists them"),
        ("mnist", ["--epochs=-1"], "--epochs takes a whole number from 1, not '-1'"),
        ("mnist", ["--epochs", "3x"], "--epochs takes a whole number from 1, not '3x'"),
        ("mnist", ["--epochs=99999999999"], "--epochs 99999999999 is too large"),
        ("mnist", ["--lr=nan"], "--lr takes a number above 0, not 'nan'"),
        ("mnist", ["--seed"], "--seed needs a value"),
        ("mnist", ["more"], "nothing takes 'more'"),
        ("mnist", ["--precision=fp8"], "--precision is fp32, bf16 or fp16, not 'fp8'"),
        ("mnist", ["--resume=nowhere"], "--resume: there is no file 'nowhere'"),
        ("mnist", ["--save=/"], "--save: cannot write to '/'"),
        ("mnist", ["--save="], "--save: cannot write to ''"),
        ("resnet", ["--batch-size=0"], "--batch-size takes a whole number from 1, not '0'"),
    ],
)
def test_program_bad_argument_ends_with_2_and_one_sentence(
    program: str, arguments: list[str], words: str
) -> None:
    assert words in refused(2, *arguments, program=program).stderr


@pytest.mark.processes
def test_mnist_saves_to_files_and_through_links(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "must be a file" in refused(2, f"--save={tmp_path / 'fifo'}").stderr
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to("real")
    mnist(1, tmp_path, "--epochs=1", "--save", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").stat().st_size > 0


@pytest.mark.processes
def test_program_output_that_cannot_be_written_ends_with_1() -> None:
    program = cpp_program("cpp", "examples", "mnist", "mnist")
    env = {k: v for k, v in ENVIRONMENT.items() if k not in ("RANK", "WORLD_SIZE")}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [program, "--epochs=1"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=env,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 1
    assert done.stderr == "mnist: cannot write the output: is there room on the disk?\n"


def test_program_help_lists_the_options() -> None:
    program = cpp_program("cpp", "examples", "mnist", "mnist")
    done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")
    assert "--precision WORD       of the forward pass: fp32, bf16 or fp16" in done.stdout


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.torch.jit.load:DeprecationWarning")
def test_mnist_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    mnist(1, tmp_path, "--epochs=1", "--save", saved)
    assert os.listdir(tmp_path) == ["saved"]
    other = refused(2, "--resume", saved, "--lr=0.2").stderr
    assert "was trained with --batch-size=64 --lr=0.1 --precision=fp32 --seed=1, not" in other
    (tmp_path / "truncated").write_bytes(saved.read_bytes()[:5000])
    (tmp_path / "foreign").write_text("not a checkpoint\n")
    archive = torch.jit.load(str(saved))
    for state in archive.optimizer.state.children():  # the next step would fail on it
        state.momentum_buffer = torch.zeros(3, 3)
    archive.save(str(tmp_path / "momentum"))
    for name in ("truncated", "foreign", "momentum"):
        words = f"{tmp_path / name} is not a whole checkpoint of this program"
        assert words in refused(1, "--resume", tmp_path / name).stderr


def test_mnist_half_a_launcher_ends_with_2_and_one_sentence() -> None:
    env = {k: v for k, v in ENVIRONMENT.items() if k not in ("WORLD_SIZE", "MASTER_ADDR")}
    assert "WORLD_SIZE" in refused(2, env={**env, "RANK": "0"}).stderr


def limit_files() -> None:
    """Limits file sizes. As on a full disk, write() fails."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.processes
def test_mnist_full_disk_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    temporary, saved = tmp_path / "temporary", tmp_path / "saved"
    temporary.mkdir()
    saved.write_text("before")
    words = f"cannot write the checkpoint {saved}: is there room on the disk?"
    env = {**ENVIRONMENT, "TMPDIR": str(temporary)}
    done = refused(1, "--epochs=1", "--save", saved, env=env, preexec_fn=limit_files)
    assert words in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["saved", "temporary"]
    assert saved.read_text() == "before"
    assert os.listdir(temporary) == []


def test_mnist_data_file_is_what_the_script_writes(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    import runpy

    folder = ROOT / "cpp" / "examples" / "mnist"
    runpy.run_path(str(folder / "make_digits.py"))["main"](tmp_path / "digits.bin")
    assert (tmp_path / "digits.bin").read_bytes() == (folder / "digits.bin").read_bytes()


@pytest.mark.processes
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resnet_two_ranks_train(precision: str, tmp_path: Path) -> None:
    program = cpp_program("cpp", "examples", "resnet", "resnet")
    flags = ["--batch-size=2", "--image-size=32", "--steps=2", f"--precision={precision}"]
    output = run(2, program, *flags, cwd=tmp_path)
    assert re.search(rf"final: loss [\d.]+, [\d.]+ images/s, 2 ranks, {precision}\n", output)
