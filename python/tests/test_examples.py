# SPDX-License-Identifier: BSD-3-Clause
"""The examples, in Python and in C++: they train on one process and on several, and resume."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.launch
import torch.distributed.run
from ddp_support import free_port, same_bits
from package_support import cpp_program, run_torchrun
from warm import run_script, run_script_on_ranks

from apex.parallel import multiproc

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STANDALONE = ["--standalone", "--local-addr=localhost", "--nproc_per_node=2"]
LAUNCHERS = {
    "multiproc": [multiproc.__file__, "--nproc=2"],
    "torchrun": [torch.distributed.run.__file__, *STANDALONE],
    "launch": [torch.distributed.launch.__file__, *STANDALONE],
}
TIMEOUT_S = 600  # only a guard against hangs

# Not importorskip(), because every worker collects this module.
MISSING = [name for name in ("sklearn", "tqdm") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} is not installed"),
]


def environment() -> dict[str, str]:
    """This process's environment without launchers' variables and GPUs, with a free port."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    cpu = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    return {**kept, **cpu, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def train(script: str, folder: Path, *arguments: object, ranks: int = 0) -> str:
    """The output of the script without a launcher, or on that many ranks."""
    path, texts = EXAMPLES / script, [str(argument) for argument in arguments]
    if ranks:
        done = run_script_on_ranks(
            ranks, path, *texts, cwd=folder, env=environment(), timeout_s=TIMEOUT_S
        )
    else:
        done = run_script(path, *texts, cwd=folder, env=environment(), timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\d+/\d+ \[", done.stderr), "a progress bar, but no terminal"
    return done.stdout


def losses(output: str) -> list[float]:
    """The loss of each epoch, from lines like `epoch 1/2: loss 1.2345`."""
    return [float(x) for x in re.findall(r"^epoch \d+(?:/\d+)?: loss ([\d.]+)", output, re.M)]


# --- scripts ---

FINAL_SPAWN = r"final: {ranks} rank\(s\), parameters [0-9a-f]{{12}} on all"
FINAL_IMAGENET = (
    r"step 2/2: loss \d\.\d+, \d+\.\d ms per step, \d+\.\d images/s(.|\n)*"
    r"final: best top-1 accuracy .*, {ranks} rank\(s\)"
)
IMAGENET = "--synthetic=16 --image-size=32 -b=4 --epochs=1 -j=0 -p=1 --steps=2"
#: Script, arguments, arguments for two processes (None: a launcher starts them), an upper bound of
#: the last loss (about twice the measured one; losses begin at ln 10), a part of the output.
SCRIPTS = [
    ("snippets/simple_ddp_amp.py", "--epochs=2", None, 0.9, None),
    ("snippets/simple_ddp_amp.py", "--epochs=2 --opt-level=O2", None, 0.9, None),
    ("snippets/syncbn_layer.py", "--steps=5", None, None, r"{ranks} rank\(s\), 5 batches: .* is"),
    (
        "snippets/syncbn_convert.py", "--epochs=2", None, 0.4,
        r"2 batch norms are synchronized over {ranks} rank\(s\)",
    ),
    ("spawn/main.py", "--epochs=3 --seed=1", "--processes=2", 0.9, FINAL_SPAWN),
    (
        "spawn/main.py", "--epochs=3 --seed=1 --model-parallel --workers=1", "--processes=2", 0.9,
        FINAL_SPAWN,
    ),
    ("tutorial/mnist-distributed.py", "--data=digits", "-n=1 -g=2 -nr=0", 1.5, None),
    (
        "tutorial/mnist-mixed.py", "--data=digits --images=240 --batch-size=15 --epochs=1",
        "-n=1 -g=2 -nr=0", 2.2, None,
    ),
    ("fp16_optimizer/main.py", "--epochs=2 --clip=1", None, 0.25, None),
    ("fp16_optimizer/main.py", "--epochs=2 --static-loss-scale=128", None, 0.25, None),
    ("imagenet/main.py", f"{IMAGENET} --opt-level=O0 --sync_bn -j=1", None, None, FINAL_IMAGENET),
    (
        "imagenet/main.py", f"{IMAGENET} --opt-level=O2 --sync_bn --channels-last", None, None,
        FINAL_IMAGENET,
    ),
]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("script", "arguments", "two_ranks", "loss", "final"),
    [
        pytest.param(*row, marks=[] if row[0].startswith("snippets") else pytest.mark.nightly)
        for row in SCRIPTS
    ],
)
def test_script_trains(
    script: str, arguments: str, two_ranks: str | None, loss: float | None, final: str | None,
    ranks: int, tmp_path: Path,
) -> None:  # fmt: skip
    options = arguments.split()
    if ranks == 2 and two_ranks is not None:
        options += two_ranks.split()
    by_launcher = ranks if ranks == 2 and two_ranks is None else 0
    output = train(script, tmp_path, *options, ranks=by_launcher)
    if final is not None:
        assert re.search(final.format(ranks=ranks), output), output
    if loss is not None:
        found = losses(output)
        assert found[-1] < loss and sorted(found, reverse=True) == found


@pytest.mark.nightly
def test_tutorial_step_1_trains(tmp_path: Path) -> None:
    assert losses(train("tutorial/mnist.py", tmp_path, "--data=digits"))[-1] < 1


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_a_script(launcher: str, tmp_path: Path) -> None:
    command = [*LAUNCHERS[launcher], str(EXAMPLES / "snippets/simple_ddp_amp.py"), "--epochs=1"]
    if launcher == "torchrun":  # torchrun does not pass it, so this is the default of old scripts
        command += ["--local_rank", "-1"]
    place = {"cwd": tmp_path, "env": environment(), "timeout_s": TIMEOUT_S}
    done = run_script(*command, **place)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == pytest.approx([1.7273], rel=1e-2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("spawn/main.py", "--processes=2 --seed=1"),
        ("fp16_optimizer/main.py", ""),
        ("imagenet/main.py", f"{IMAGENET} --opt-level=O2 --deterministic"),
    ],
)
def test_resumed_script_ends_as_if_it_had_not_stopped(
    script: str, arguments: str, tmp_path: Path
) -> None:
    def run(epochs: int, *more: object) -> None:
        train(script, tmp_path, *arguments.split(), f"--epochs={epochs}", *more)

    half, resumed, whole = (tmp_path / name for name in ("half", "resumed", "whole"))
    run(1, "--checkpoint", half)
    run(2, "--resume", half, "--checkpoint", resumed)
    run(2, "--checkpoint", whole)
    assert same_bits(torch.load(resumed), torch.load(whole))
    assert not same_bits(torch.load(half), torch.load(whole))


def test_mnist_two_ranks_learn_as_one_process_does(tmp_path: Path) -> None:
    """As the README says: bitwise equal parameters, losses up to rounding, and the same bits after
    a resume."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    train("mnist/main.py", tmp_path, "--no-cuda", "--epochs=3", "--loss-log", one)
    options = ["--no-cuda", "--loss-log", two, "--save", tmp_path / "run.pt"]
    output = train("mnist/main.py", tmp_path, *options, ranks=2)
    accuracy = re.search(
        r"^final: test accuracy ([\d.]+) %, trained .* samples/s, (.*)$", output, re.M
    )
    assert accuracy is not None and float(accuracy[1]) > 97
    assert accuracy[2] == "2 ranks (gloo), parameters bitwise equal"
    alone, together = (json.loads(log.read_text())["losses"] for log in (one, two))
    assert together[: len(alone)] == pytest.approx(alone, rel=1e-4)
    train("mnist/main.py", tmp_path, *options, "--epochs=1", ranks=2)
    again = ["--resume", tmp_path / "run.pt", "--epochs=2"]
    train("mnist/main.py", tmp_path, *options, *again, ranks=2)
    assert json.loads(two.read_text())["losses"] == together[len(alone) // 3 : 2 * len(alone) // 3]


@pytest.mark.nightly
def test_notebook_runs(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "notebook" / "two_ranks.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    first, *rest, picture = sources
    assert "matplotlib" in picture  # which is not needed for the rest
    assert first.startswith("%%writefile two_ranks.py\n")
    (tmp_path / "two_ranks.py").write_text(first.partition("\n")[2])
    (tmp_path / "cells.py").write_text("\n".join(rest))

    command = [sys.executable, "-c", "exec(open('cells.py').read())"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert "bitwise equal" in done.stdout


# --- C++ ---


def run_cpp(name: str, ranks: int, folder: Path, *arguments: str) -> str:
    program = str(cpp_program("cpp", "examples", name, name))
    if ranks == 1:
        done = subprocess.run(
            [program, *arguments], cwd=folder, env=environment(), capture_output=True, text=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip
    else:
        done = run_torchrun(
            ranks, program, *arguments, cwd=folder, env=environment(), timeout_s=TIMEOUT_S
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_cpp_mnist_two_ranks_learn_as_one_process_does(tmp_path: Path) -> None:
    alone = run_cpp("mnist", 1, tmp_path, "--epochs=3")
    save = f"--save={tmp_path / 'run.ckpt'}"
    together = run_cpp("mnist", 2, tmp_path, "--epochs=2", save)
    rest = run_cpp("mnist", 2, tmp_path, "--epochs=15", save)
    assert losses(together) + losses(rest)[:1] == pytest.approx(losses(alone), rel=1e-4)
    assert "96." in rest and "2 ranks, fp32, parameters bitwise equal" in rest
    mixed = run_cpp("mnist", 2, tmp_path, "--epochs=2", "--precision=bf16")
    assert losses(mixed) != losses(together) and losses(mixed)[-1] < 2.2


@pytest.mark.nightly
def test_cpp_tutorial_resumed_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = losses(run_cpp("tutorial", 2, tmp_path, "2", "whole"))
    assert whole[-1] < 0.2
    parts = losses(run_cpp("tutorial", 2, tmp_path, "1", "parts"))
    assert parts + losses(run_cpp("tutorial", 2, tmp_path, "2", "parts")) == whole
