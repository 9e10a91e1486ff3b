"""The C++ examples as users start them: torchrun --no-python."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from ddp_support import free_port
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
    """Loss and test accuracy in percent after every epoch, on so many processes."""
    output = run(processes, cpp_program("cpp", "examples", "mnist", "mnist"), *arguments, cwd=cwd)
    assert "parameters bitwise equal" in output
    lines = re.findall(r"^epoch \d+: loss ([\d.]+), test accuracy ([\d.]+) %$", output, re.M)
    return [(float(loss), float(accuracy)) for loss, accuracy in lines]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """Twelve epochs on two ranks; a shorter run begins alike."""
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
    mixed = mnist(2, tmp_path, "--epochs=6", f"--precision={precision}")
    assert mixed[0] != together[0]  # the flag does something
    assert mixed[-1][1] >= 90


@pytest.mark.parametrize(
    ("argument", "words"),
    [("--epoch=3", "unknown argument --epoch"), ("--precision=fp8", "fp32, bf16 or fp16")],
)
def test_mnist_bad_argument_one_sentence(argument: str, words: str) -> None:
    program = cpp_program("cpp", "examples", "mnist", "mnist")
    result = subprocess.run([program, argument], capture_output=True, text=True, timeout=600)
    assert result.returncode == 1
    assert words in result.stderr and result.stderr.count("\n") == 1


def test_mnist_data_file_is_what_the_script_writes(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    import runpy

    folder = ROOT / "cpp" / "examples" / "mnist"
    runpy.run_path(str(folder / "make_digits.py"))["main"](tmp_path / "digits.bin")
    assert (tmp_path / "digits.bin").read_bytes() == (folder / "digits.bin").read_bytes()


@pytest.mark.processes
def test_c_two_ranks_learn_the_digits_as_one_process_does(tmp_path: Path) -> None:
    """Plain C through apex/c_api.h. Oracle: one process on the whole batches."""
    program = cpp_program("cpp", "examples", "c", "c_digits")
    data = program.parent / "digits.bin"

    def epochs(output: str) -> list[list[float]]:
        found = re.findall(r"^epoch \d+: loss ([\d.]+), test accuracy ([\d.]+) %$", output, re.M)
        assert len(found) == 10, output
        return [[float(number) for number in pair] for pair in found]

    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone = subprocess.run(
        [program, data], env=ENVIRONMENT | place | {"MASTER_PORT": str(free_port())},
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    together = epochs(run(2, program, data, cwd=tmp_path))
    expected = epochs(alone.stdout)
    assert together[-1][1] > 90
    for (loss, _), (expected_loss, _) in zip(together, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-3)
    bad = subprocess.run(
        [program, data], env={**ENVIRONMENT, "RANK": "0"}, capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    assert bad.returncode == 1
    assert "c_digits: apex_init(): " in bad.stderr and bad.stderr.count("\n") == 1


@pytest.mark.processes
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resnet_two_ranks_train(precision: str, tmp_path: Path) -> None:
    program = cpp_program("cpp", "examples", "resnet", "resnet")
    flags = ["--batch-size=2", "--image-size=32", "--steps=2", f"--precision={precision}"]
    output = run(2, program, *flags, cwd=tmp_path)
    assert re.search(rf"final: loss [\d.]+, [\d.]+ images/s, 2 ranks, {precision}\n", output)
