# SPDX-License-Identifier: BSD-3-Clause
"""The C++ tutorial: its five programs with their output and files, and the code on its page."""

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
    """The losses of all steps, and the test accuracy in percent after every epoch."""
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
    # The reference is one process on whole batches. Only step 3 normalizes and computes as it does.
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
    ("step", "arguments", "words"),
    [
        (1, ["--epochen=3"], "there is no option --epochen=3; --help lists them"),
        (1, ["--epochs=three"], "--epochs takes a whole number from 1, not 'three'"),
        (1, ["--data=/no/digits"], "--data: there is no file '/no/digits'"),
        (1, ["--csv=/no/losses.csv"], "--csv: cannot write to '/no/losses.csv'"),
        (1, ["--checkpoint=run.ckpt"], "there is no option --checkpoint=run.ckpt"),
        (5, ["--checkpoint=/no/run.ckpt"], "--checkpoint: cannot write to '/no/run.ckpt'"),
        (5, [], "RANK"),  # without a launcher
    ],
)
def test_tutorial_bad_argument_ends_with_2_and_one_sentence(
    step: int, arguments: list[str], words: str
) -> None:
    name = {1: "step1_one_process", **STEPS}[step]
    launcher = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in ENVIRONMENT.items() if name not in launcher}
    command = [program(name), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}: ")
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_tutorial_help_lists_the_options() -> None:
    for name, lists_checkpoint in (("step1_one_process", False), (STEPS[5], True)):
        command = [program(name), "--help"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0
        assert done.stdout.startswith("usage: ") and "--csv FILE" in done.stdout
        assert ("--checkpoint FILE" in done.stdout) == lists_checkpoint


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
