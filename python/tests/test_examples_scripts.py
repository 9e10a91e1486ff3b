# SPDX-License-Identifier: BSD-3-Clause
"""The scripts in these folders run on one process and on two CPU ranks, and report what is missing.

Other tests cover the other scripts in examples/.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.launch
import torch.distributed.run
import torch.nn.functional as F
from ddp_support import free_port, require, run_ranks
from examples_support import EXAMPLES, TIMEOUT_S, assert_one_sentence, environment, run, train
from torch import nn
from warm import run_script

from apex.parallel import multiproc

require("sklearn", "tqdm")

STANDALONE = ["--standalone", "--local-addr=localhost", "--nproc_per_node=2"]
LAUNCHERS = {
    "multiproc": [multiproc.__file__, "--nproc=2"],
    "torchrun": [torch.distributed.run.__file__, *STANDALONE],
    "launch": [torch.distributed.launch.__file__, *STANDALONE],
}


@dataclass(frozen=True)
class Script:
    """A script with a small workload.

    Args:
        path: relative to examples/.
        arguments: make the workload small.
        two_ranks: arguments for two processes; None if a launcher starts them.
        loss: upper bound for the last epoch's printed loss; None if the script prints no
            losses.
        final: a regular expression that the output of N ranks contains; {ranks} becomes N.
        needs: the start of the error if scikit-learn is missing; None if it is not needed.
    """

    path: str
    arguments: tuple[str, ...]
    two_ranks: tuple[str, ...] | None = None
    loss: float | None = None
    final: str | None = None
    needs: str | None = "the digits come with scikit-learn"

    def train(self, ranks: int, folder: Path) -> subprocess.CompletedProcess[str]:
        if ranks == 2 and self.two_ranks is None:
            return train(self.path, folder, *self.arguments, ranks=2)
        chosen = self.two_ranks if ranks == 2 and self.two_ranks is not None else ()
        return train(self.path, folder, *self.arguments, *chosen)


# Losses begin at ln 10 = 2.3. The bounds are about twice the values measured on two ranks.
SCRIPTS = {
    "simple_ddp_amp": Script("snippets/simple_ddp_amp.py", ("--epochs=2",), loss=0.9),
    "simple_ddp_amp O2": Script(
        "snippets/simple_ddp_amp.py", ("--epochs=2", "--opt-level=O2"), loss=0.9
    ),
    "syncbn_layer": Script(
        "snippets/syncbn_layer.py",
        ("--steps=5",),
        final=r"{ranks} rank\(s\), 5 batches: .* is \d\.\de-\d\d\.",
        needs=None,
    ),
    "syncbn_convert": Script(
        "snippets/syncbn_convert.py",
        ("--epochs=2",),
        loss=0.4,
        final=r"2 batch norms are synchronized over {ranks} rank\(s\)",
    ),
    "spawn": Script(
        "spawn/main.py",
        ("--epochs=3", "--seed=1"),
        two_ranks=("--processes=2",),
        loss=0.9,
        final=r"final: {ranks} rank\(s\), parameters [0-9a-f]{{12}} on all",
    ),
    "spawn model parallel": Script(
        "spawn/main.py",
        ("--epochs=3", "--seed=1", "--model-parallel", "--workers=1"),
        two_ranks=("--processes=2",),
        loss=0.9,
        final=r"final: {ranks} rank\(s\), parameters [0-9a-f]{{12}} on all",
    ),
    "mnist-distributed": Script(
        "tutorial/mnist-distributed.py",
        ("--data=digits",),
        two_ranks=("-n=1", "-g=2", "-nr=0"),
        loss=1.5,
    ),
    "mnist-mixed": Script(
        "tutorial/mnist-mixed.py",
        ("--data=digits", "--images=240", "--batch-size=15", "--epochs=1"),
        two_ranks=("-n=1", "-g=2", "-nr=0"),
        loss=2.2,
    ),
    "fp16_optimizer": Script("fp16_optimizer/main.py", ("--epochs=2", "--clip=1"), loss=0.25),
    "fp16_optimizer static": Script(
        "fp16_optimizer/main.py", ("--epochs=2", "--static-loss-scale=128"), loss=0.25
    ),
    **{
        f"imagenet {name}": Script(
            "imagenet/main.py",
            (*("--synthetic=16", "--image-size=32", "-b=4", "--epochs=1", "-j=0", "-p=1"), *more),
            final=r"step 2/2: loss \d\.\d+, \d+\.\d ms per step, \d+\.\d images/s(.|\n)*"
            r"final: best top-1 accuracy .*, {ranks} rank\(s\)",
            needs=None,
        )
        for name, more in {
            "O0 sync_bn": ("--steps=2", "--opt-level=O0", "--sync_bn", "-j=1"),
            "O1": ("--steps=2", "--opt-level=O1"),
            "O2 sync_bn": ("--steps=2", "--opt-level=O2", "--sync_bn", "--channels-last"),
            "O3": ("--steps=2", "--opt-level=O3", "--keep-batchnorm-fp32=True"),
        }.items()
    },
}
#: One process only.
SINGLE = {"mnist": Script("tutorial/mnist.py", ("--data=digits", "--epochs=2"), loss=1.0)}
ALL = {**SCRIPTS, **SINGLE}


#: Is started as users do; the others are forked, and so are the processes that they spawn.
NOT_FORKED = "mnist-distributed"
#: One row per script, without rows that only have other arguments.
EACH_SCRIPT = list({script.path: name for name, script in reversed(ALL.items())}.values())

pytestmark = pytest.mark.processes


def losses(stdout: str) -> list[float]:
    """The loss of each epoch, from lines like `epoch 1/2: loss 1.2345`."""
    return [
        float(loss) for loss in re.findall(r"^epoch \d+/\d+: loss (\S+?),?(?: |$)", stdout, re.M)
    ]


@dataclass(frozen=True)
class Alone:
    """A one-process run that a test examines. Such runs are executed in parallel.

    Args:
        script: relative to examples/.
        arguments: of the script.
        forked: from a process that has imported torch.
        scikit_learn: whether it can be imported.
    """

    script: str
    arguments: tuple[str, ...]
    forked: bool = True
    scikit_learn: bool = True

    def start(self, folder: Path) -> subprocess.CompletedProcess[str]:
        path = EXAMPLES / self.script
        if not self.forked:
            return run([sys.executable, str(path), *self.arguments], folder)
        if self.scikit_learn:
            return train(self.script, folder, *self.arguments)
        env = environment(PYTHONPATH=without_scikit_learn(folder))
        return run_script(
            path, *self.arguments, cwd=folder, env=env, timeout_s=TIMEOUT_S, without="sklearn"
        )


def without_scikit_learn(folder: Path) -> str:
    (folder / "hidden" / "sklearn").mkdir(parents=True)
    (folder / "hidden/sklearn/__init__.py").write_text("raise ImportError('none here')\n")
    path = os.environ.get("PYTHONPATH")
    return f"{folder / 'hidden'}{os.pathsep}{path}" if path else str(folder / "hidden")


@pytest.fixture(scope="module")
def runs_alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Alone, Future[subprocess.CompletedProcess[str]]]]:
    """The runs of all selected tests, in order. As many run in parallel as there are cores."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    wanted = [
        item.callspec.params["done"]
        for item in items
        if item.module is request.module
        and hasattr(item, "callspec")
        and "done" in item.callspec.params
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            alone: pool.submit(alone.start, tmp_path_factory.mktemp("alone")) for alone in wanted
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def done(
    request: pytest.FixtureRequest,
    runs_alone: dict[Alone, Future[subprocess.CompletedProcess[str]]],
) -> subprocess.CompletedProcess[str]:
    return runs_alone[request.param].result()


def check_output(script: Script, ranks: int, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    if script.final is not None:
        assert re.search(script.final.format(ranks=ranks), done.stdout), done.stdout
    if script.loss is not None:
        found = losses(done.stdout)
        assert found, done.stdout
        assert found[-1] < script.loss
        assert sorted(found, reverse=True) == found


@pytest.mark.parametrize(
    ("name", "done"),
    [
        (name, Alone(ALL[name].path, ALL[name].arguments, forked=name != NOT_FORKED))
        for name in EACH_SCRIPT
    ],
    ids=EACH_SCRIPT,
    indirect=["done"],
)
def test_script_one_process_trains(name: str, done: subprocess.CompletedProcess[str]) -> None:
    check_output(ALL[name], 1, done)
    assert not re.search(r"\d+/\d+ \[", done.stderr), "a progress bar, but no terminal"


@dataclass(frozen=True)
class Together:
    """A run on two ranks, in its folder."""

    done: subprocess.CompletedProcess[str]
    folder: Path


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Together]:
    """The script of that row on two ranks, run once for all tests."""

    @functools.cache
    def trained_once(name: str) -> Together:
        folder = tmp_path_factory.mktemp("together")
        return Together(SCRIPTS[name].train(2, folder), folder)

    return trained_once


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_two_ranks_train(name: str, together: Callable[[str], Together]) -> None:
    script = SCRIPTS[name]
    done, folder = together(name).done, together(name).folder
    check_output(script, 2, done)
    assert not re.search(r"\d+/\d+ \[", done.stderr), "a progress bar, but no terminal"
    if script.two_ranks is None:
        assert not re.search(r"\d+/\d+ \[|epoch", (folder / "rank_1.log").read_text())
    else:
        # The ranks share the terminal, so only one of them may print.
        lines = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
        assert len(lines) == len(set(line.partition(":")[0] for line in lines))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_script_every_launcher_starts_it(
    launcher: str, together: Callable[[str], Together], tmp_path: Path
) -> None:
    """The launcher does not affect the result."""
    expected = losses(together("simple_ddp_amp").done.stdout)[:1]
    command = [*LAUNCHERS[launcher], str(EXAMPLES / "snippets/simple_ddp_amp.py"), "--epochs=1"]
    if launcher == "torchrun":  # torchrun does not pass it, so this is the default of old scripts
        command += ["--local_rank", "-1"]
    # multiproc starts a new python for each rank; test_examples_mnist does so for torchrun.
    place = {"cwd": tmp_path, "env": environment(), "timeout_s": TIMEOUT_S}
    done = run_script(*command, **place, forks_ranks=launcher != "multiproc")
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "done",
    [Alone(ALL[name].path, ("--help",)) for name in EACH_SCRIPT],
    ids=EACH_SCRIPT,
    indirect=True,
)
def test_help_describes_the_options(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    assert "--epochs" in done.stdout or "--steps" in done.stdout


WITH_DATA = [name for name in EACH_SCRIPT if ALL[name].needs]


@pytest.mark.parametrize(
    ("name", "done"),
    [(n, Alone(ALL[n].path, ALL[n].arguments, scikit_learn=False)) for n in WITH_DATA],
    ids=WITH_DATA,
    indirect=["done"],
)
def test_missing_data_fails_with_one_sentence(
    name: str, done: subprocess.CompletedProcess[str]
) -> None:
    script = ALL[name]
    assert_one_sentence(done, f"{Path(script.path).name}: {script.needs}")


BAD_ARGUMENTS = [
    ("imagenet/main.py", (), "main.py: name the folder with the images"),
    ("imagenet/main.py", ("nowhere",), "main.py: there is no folder nowhere/train"),
    (
        "imagenet/main.py",
        ("--synthetic=4", "-a=vgg16"),
        "main.py: there is no network --arch vgg16",
    ),
    ("imagenet/main.py", ("--synthetic=4", "-b=8"), "no whole batch of 8"),
    ("imagenet/main.py", ("--resume=nowhere.pt",), "there is no checkpoint nowhere.pt"),
    ("fp16_optimizer/main.py", ("--resume=nowhere.pt",), "there is no checkpoint nowhere.pt"),
    ("spawn/main.py", ("--resume=nowhere.pt",), "there is no checkpoint nowhere.pt"),
    ("spawn/main.py", ("--rank=1",), "--rank 1 is not one of 1 machines"),
    ("spawn/main.py", ("--gpu=0", "--processes=2"), "--gpu is for one process"),
    ("spawn/main.py", ("--processes=4", "-b=3"), "leaves some of the 4 processes without samples"),
    ("spawn/main.py", ("--world-size=2",), "give --dist-url"),
    ("tutorial/mnist.py", ("--data=mnist",), "mnist.py: MNIST is not in data"),
    ("tutorial/mnist-distributed.py", ("-nr=1",), "-nr 1 is not one of 1 machines"),
]


@pytest.mark.parametrize(
    ("sentence", "done"),
    [(sentence, Alone(script, arguments)) for script, arguments, sentence in BAD_ARGUMENTS],
    ids=[" ".join((script, *arguments)) for script, arguments, _ in BAD_ARGUMENTS],
    indirect=["done"],
)
def test_bad_argument_fails_with_one_sentence(
    sentence: str, done: subprocess.CompletedProcess[str]
) -> None:
    assert_one_sentence(done, sentence)


# --- what the READMEs promise about single scripts ---


def spawn(ranks: int, folder: Path, *arguments: str) -> str:
    """The digest of all parameters at the end of the run."""
    done = train("spawn/main.py", folder, f"--processes={ranks}", "--seed=5", *arguments)
    assert done.returncode == 0, done.stderr
    match = re.search(r"parameters ([0-9a-f]{12}) on all", done.stdout)
    assert match is not None, done.stdout
    return match[1]


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest after one epoch on two processes."""
    return spawn(2, tmp_path_factory.mktemp("spawned"), "--epochs=1")


@dataclass(frozen=True)
class Saved:
    digest: str
    checkpoint: Path


@pytest.fixture(scope="module")
def spawned_alone(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """One epoch on one process."""
    folder = tmp_path_factory.mktemp("spawned_alone")
    return Saved(spawn(1, folder, "--epochs=1", "--checkpoint=one.pt"), folder / "one.pt")


def test_spawn_same_seed_ends_with_the_same_bits(spawned: str, tmp_path: Path) -> None:
    assert spawn(2, tmp_path, "--epochs=1") == spawned
    assert spawn(2, tmp_path, "--epochs=1", "--seed=6") != spawned


def test_spawn_model_parallel_on_the_cpu_computes_the_same(
    spawned_alone: Saved, tmp_path: Path
) -> None:
    assert spawn(1, tmp_path, "--epochs=1", "--model-parallel") == spawned_alone.digest


def test_spawn_resumed_ends_with_the_bits_of_one_run(tmp_path: Path) -> None:
    whole = spawn(2, tmp_path, "--epochs=2")
    assert spawn(2, tmp_path, "--epochs=1", "--checkpoint=half.pt") != whole
    assert spawn(2, tmp_path, "--epochs=2", "--resume=half.pt") == whole


@pytest.mark.parametrize(
    "place",
    [
        ("--rank={rank}", "--dist-url=file://{meeting}"),
        ("--multiprocessing-distributed", "--dist-url=env://"),
        ("--gpu=0", "--no-cuda", "--rank={rank}", "--dist-url=file://{meeting}"),
    ],
    ids=["rank", "RANK", "gpu"],
)
def test_spawn_two_machines_are_one_job(
    place: tuple[str, ...], spawned: str, tmp_path: Path
) -> None:
    folders = [tmp_path / "node0", tmp_path / "node1"]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def machine(rank: int) -> subprocess.CompletedProcess[str]:
        folders[rank].mkdir()
        options = [part.format(rank=rank, meeting=tmp_path / "meeting") for part in place]
        small = ("--world-size=2", "-b=32", "--seed=5", "--epochs=1")
        return train("spawn/main.py", folders[rank], *small, *options, RANK=str(rank), **address)

    with ThreadPoolExecutor(2) as pool:
        machines = list(pool.map(machine, (0, 1)))
    assert [done.returncode for done in machines] == [0, 0], machines
    outputs = [done.stdout for done in machines]
    assert "final: 2 rank(s)" in outputs[0]
    assert outputs[1] == ""
    # The location of the processes does not affect the result: 32 samples each.
    assert spawned in outputs[0]


def test_spawn_other_settings_are_refused(spawned_alone: Saved, tmp_path: Path) -> None:
    arguments = (f"--resume={spawned_alone.checkpoint}", "--seed=5", "--batch-size=32")
    done = train("spawn/main.py", tmp_path, *arguments)
    assert_one_sentence(done, "was trained with --batch-size 64, not 32")


def imagenet(folder: Path, *arguments: str) -> list[str]:
    """The printed losses."""
    small = ["--synthetic=8", "--image-size=16", "-b=2", "-j=0", "-p=1", "--opt-level=O2"]
    done = train("imagenet/main.py", folder, *small, "--steps=1", *arguments, ranks=2)
    assert done.returncode == 0, done.stderr
    return re.findall(r"loss (\d\.\d+)", done.stdout)


@dataclass(frozen=True)
class FirstEpoch:
    losses: list[str]
    checkpoint: Path


@pytest.fixture(scope="module")
def imagenet_begun(tmp_path_factory: pytest.TempPathFactory) -> FirstEpoch:
    """The first epoch on two ranks."""
    folder = tmp_path_factory.mktemp("imagenet_begun")
    return FirstEpoch(imagenet(folder, "--epochs=1", "--checkpoint=one.pt"), folder / "one.pt")


def test_imagenet_resumed_continues_with_the_same_losses(
    imagenet_begun: FirstEpoch, tmp_path: Path
) -> None:
    whole = imagenet(tmp_path, "--epochs=3")
    assert len(whole) == 3
    assert imagenet_begun.losses == whole[:1]
    assert imagenet(tmp_path, "--epochs=3", f"--resume={imagenet_begun.checkpoint}") == whole[1:]


class _BufferChooses(nn.Module):
    """Predicts the class of its buffer."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.register_buffer("chosen", torch.tensor(chosen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.one_hot(self.chosen, 10).float().expand(len(x), 10)


def _evaluate_body(rank: int, world_size: int) -> None:
    sys.path.insert(0, str(EXAMPLES / "imagenet"))
    try:
        main = runpy.run_path(str(EXAMPLES / "imagenet" / "main.py"))
    finally:
        sys.path.remove(str(EXAMPLES / "imagenet"))
    loader = [(torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64))]
    job = main["Job"](rank, world_size, torch.device("cpu"))
    accuracy = main["evaluate"](_BufferChooses(9 * rank), loader, torch.contiguous_format, job)
    assert accuracy == (100, 100), accuracy


@pytest.mark.processes
def test_imagenet_evaluates_with_the_buffers_of_rank_0() -> None:
    run_ranks(2, _evaluate_body)


def test_imagenet_resumed_at_another_level_is_refused(
    imagenet_begun: FirstEpoch, tmp_path: Path
) -> None:
    arguments = ("--synthetic=8", f"--resume={imagenet_begun.checkpoint}", "--opt-level=O0")
    done = train("imagenet/main.py", tmp_path, *arguments)
    assert_one_sentence(done, "was trained with --opt-level O2, not O0")


def picture_folder(folder: Path) -> Path:
    """Two classes in ImageNet's layout: mostly red and mostly blue images of several sizes."""
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 12), ("val", 4)):
        for number in range(count):
            name, colour = ("red", (200, 30, 20)) if number % 2 else ("blue", (20, 40, 210))
            path = folder / part / name / f"{number}.{'png' if number % 3 else 'JPEG'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.new("RGB" if number % 5 else "RGBA", (40 + number, 60 - number), colour).convert(
                "RGB"
            ).save(path)
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_imagenet_images_in_folders_train(ranks: int, tmp_path: Path) -> None:
    folder = picture_folder(tmp_path / "pictures")
    small = ["--image-size=32", f"-b={6 // ranks}", "--epochs=1", "-j=1", "--opt-level=O0", "-p=1"]
    several = {"ranks": 2} if ranks == 2 else {}
    done = train("imagenet/main.py", tmp_path, str(folder), *small, **several)
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 2/2: loss \d\.\d+", done.stdout), done.stdout
    assert re.search(rf"final: best top-1 accuracy \d+\.\d+ %, {ranks} rank", done.stdout)


@pytest.fixture
def imagenet_images() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLES / "imagenet"))
    yield importlib.import_module("images")
    sys.path.pop(0)


@pytest.mark.parametrize("train", [True, False])
def test_imagenet_folder_gives_normalized_images_and_their_labels(
    train: bool, imagenet_images: ModuleType, tmp_path: Path
) -> None:
    folder = picture_folder(tmp_path)
    found = imagenet_images.FolderImages(folder / "train", ["blue", "red"], 24, train)
    assert len(found) == 12
    for image, label in (found[index] for index in range(len(found))):
        assert image.shape == (3, 24, 24) and image.dtype == torch.float32
        red, _, blue = (
            image.mean((1, 2)) * torch.tensor(imagenet_images.DEVIATION)
            + torch.tensor(imagenet_images.MEAN)
        ).tolist()
        assert (red, blue) == pytest.approx(
            (200 / 255, 20 / 255) if label == 1 else (20 / 255, 210 / 255), abs=0.03
        )


def test_imagenet_folder_without_images_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    for part in ("train", "val"):
        (tmp_path / part / "nothing").mkdir(parents=True)
    done = train("imagenet/main.py", tmp_path, str(tmp_path))
    assert_one_sentence(done, "main.py: there are no images in")


def test_imagenet_parts_of_images_lie_inside(imagenet_images: ModuleType) -> None:
    for width, height in ((500, 375), (30, 200), (1, 1)):
        parts = [imagenet_images.random_part(width, height) for _ in range(200)]
        for left, top, right, bottom in [imagenet_images.middle(width, height), *parts]:
            assert 0 <= left < right <= width + 1e-9
            assert 0 <= top < bottom <= height + 1e-9


def trained(script: str, folder: Path, *arguments: str) -> list[float]:
    """The printed losses of two ranks, one per epoch."""
    done = train(script, folder, *arguments, ranks=2)
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


def test_fp16_optimizer_resumed_continues_with_the_same_losses(
    together: Callable[[str], Together], tmp_path: Path
) -> None:
    whole = losses(together("fp16_optimizer").done.stdout)
    assert len(whole) == 2
    script = SCRIPTS["fp16_optimizer"]
    first = trained(script.path, tmp_path, *script.arguments, "--epochs=1", "--checkpoint=one.pt")
    assert first == whole[:1]
    assert trained(script.path, tmp_path, *script.arguments, "--resume=one.pt") == whole[1:]


def test_simple_ddp_amp_losses_agree_with_float32(
    together: Callable[[str], Together], tmp_path: Path
) -> None:
    exact = trained("snippets/simple_ddp_amp.py", tmp_path, "--epochs=1", "--opt-level=O0")
    assert len(exact) == 1
    for name in ("simple_ddp_amp", "simple_ddp_amp O2"):  # the default level is O1
        found = losses(together(name).done.stdout)[:1]
        assert found == pytest.approx(exact, rel=0.02), name


@pytest.mark.cuda
@pytest.mark.nccl
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", [name for name in SCRIPTS if "model parallel" not in name])
def test_script_one_rank_per_gpu_trains(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    gpus = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    path = str(EXAMPLES / script.path)
    if script.two_ranks is None:
        command = [sys.executable, *LAUNCHERS["multiproc"][:-1], f"--nproc={gpus}", path]
        command += script.arguments
    else:
        ranks = [part.replace("=2", f"={gpus}") for part in script.two_ranks]
        command = [sys.executable, path, *script.arguments, *ranks]
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_VISIBLE_DEVICES": visible}
    check_output(script, gpus, run(command, tmp_path, **env))


def test_table_names_every_script() -> None:
    folders = {Path(script.path).parent.name for script in ALL.values()}
    scripts = {
        str(path.relative_to(EXAMPLES))
        for path in EXAMPLES.glob("*/*.py")
        if path.parent.name in folders and "__main__" in path.read_text()
    }
    assert scripts == {script.path for script in ALL.values()}
