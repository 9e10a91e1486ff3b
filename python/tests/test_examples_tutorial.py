# SPDX-License-Identifier: BSD-3-Clause
"""The C++ tutorial: its five programs, what they print and write, and the blocks of its page."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from package_support import ROOT, cpp_program, run_torchrun

FOLDER = ROOT / "cpp" / "examples" / "tutorial"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
STEPS = {
    2: "step2_two_processes",
    3: "step3_batch_norm",
    4: "step4_mixed_precision",
    5: "step5_checkpoints",
}


def program(name: str) -> str:
    return str(cpp_program("cpp", "examples", "tutorial", name))


def run(step: int, cwd: Path, *arguments: str) -> tuple[list[float], list[float]]:
    """Losses of all steps, and test accuracy in percent after every epoch."""
    arguments = (f"--csv={cwd / f'{step}.csv'}", *arguments)
    if step == 1:
        command = [program("step1_one_process"), *arguments]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    else:
        command = [program(STEPS[step]), *arguments]
        done = run_torchrun(2, *command, cwd=cwd, env=ENVIRONMENT, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = re.findall(
        r"^epoch \d+: loss [\d.]+, test accuracy ([\d.]+) %$", done.stdout, re.M
    )
    heading, *losses = (cwd / f"{step}.csv").read_text().splitlines()
    assert heading == "loss"
    return [float(loss) for loss in losses], [float(accuracy) for accuracy in accuracies]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float]]:
    return run(1, tmp_path_factory.mktemp("alone"), "--epochs=2")


@pytest.mark.processes
@pytest.mark.parametrize("step", [2, 3, 4])
def test_tutorial_step_on_two_ranks_follows_one_process(
    step: int, alone: tuple[list[float], list[float]], tmp_path: Path
) -> None:
    losses, accuracies = run(step, tmp_path, "--epochs=2")
    expected, expected_accuracies = alone
    assert len(losses) == len(expected) == 2 * 23
    assert accuracies[-1] > 90 and expected_accuracies[-1] > 90
    # Oracle: one process on whole batches. Only step 3 normalizes and computes as it does.
    same = losses[:10] == pytest.approx(expected[:10], rel=1e-3)
    assert same == (step == 3)


@pytest.mark.processes
def test_tutorial_step_5_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    expected = run(5, whole, "--epochs=2")
    checkpoint = f"--checkpoint={parts / 'run.ckpt'}"
    run(5, parts, "--epochs=1", checkpoint)
    losses, accuracies = run(5, parts, "--epochs=2", checkpoint)
    assert (losses, accuracies) == (expected[0], expected[1][1:])


def test_tutorial_losses_are_drawn(tmp_path: Path) -> None:
    for name, losses in (("one", "3\n1\n"), ("two<", "2\n2\n1\n")):
        (tmp_path / f"{name}.csv").write_text("loss\n" + losses)
    picture = tmp_path / "losses.svg"
    draw = runpy.run_path(str(FOLDER / "draw_losses.py"))
    curves = {path.stem: draw["read_losses"](path) for path in sorted(tmp_path.glob("*.csv"))}
    picture.write_text(draw["draw"](curves))
    text = picture.read_text()
    assert text.count("<polyline") == 2 and "two&lt;" in text and "step 3<" in text
    bad = tmp_path / "bad.csv"
    bad.write_text("nothing\n")
    command = [sys.executable, str(FOLDER / "draw_losses.py"), str(bad)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and str(bad) in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epoch=3"], "unknown argument --epoch=3"),
        (["--epochs=three"], "--epochs is a number from 1, not 'three'"),
        (["--data=/no/digits"], "cannot read /no/digits"),
        (["--csv=/no/losses.csv"], "cannot write /no/losses.csv"),
    ],
)
def test_tutorial_bad_argument_one_sentence(arguments: list[str], words: str) -> None:
    command = [program("step1_one_process"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_tutorial_page_shows_lines_of_the_programs() -> None:
    text = (ROOT / "docs" / "cpp" / "tutorial.md").read_text()
    sections = re.split(r"^## Step ", text, flags=re.M)[1:]
    assert len(sections) == 5
    for section in sections:
        source = next(FOLDER.glob(f"step{section[0]}_*.cpp")).read_text()
        blocks = re.findall(r"^```cpp\n(.*?)^```$", section, re.M | re.S)
        assert blocks
        for block in blocks:
            assert block in source, f"not in step {section[0]}:\n{block}"
