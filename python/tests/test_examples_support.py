# SPDX-License-Identifier: BSD-3-Clause
"""examples/example_support.py: handling of bad input, and the files that examples leave behind."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from examples_support import EXAMPLES, TIMEOUT_S, assert_one_sentence, environment, train
from warm import run_script

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
SETTINGS = {"batch_size": 32}
CPU = torch.device("cpu")


@pytest.fixture
def support(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["/somewhere/main.py"])
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    yield importlib.import_module("example_support")


@pytest.fixture
def sentence(
    capsys: pytest.CaptureFixture[str],
) -> Callable[[int, Callable[[], Any]], str]:
    """The one-line output of a call that exits with an exit code."""

    def ends(code: int, call: Callable[[], Any]) -> str:
        with pytest.raises(SystemExit) as stopped:
            call()
        assert stopped.value.code == code
        printed = capsys.readouterr().err
        assert printed.startswith("main.py: ") and printed.count("\n") == 1, printed
        return printed

    return ends


# --- types of arguments ---


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("positive_int", "3", 3),
        ("non_negative_int", "0", 0),
        ("seed", "4611686018427387903", 2**62 - 1),
        ("positive_float", "1e-3", 1e-3),
        ("non_negative_float", "0", 0.0),
    ],
)
def test_number_in_range_accepted(kind: str, text: str, value: float, support: ModuleType) -> None:
    assert getattr(support, kind)(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("positive_int", "0", "0 is not a positive number"),
        ("positive_int", "3x", "'3x' is not a whole number"),
        ("positive_int", "1.5", "'1.5' is not a whole number"),
        ("non_negative_int", "-1", "-1 is negative"),
        ("seed", "4611686018427387904", "is too large"),
        ("positive_int", "99999999999999999999", "is too large"),
        ("positive_float", "1e39", "1e39 is too large for float32"),
        ("positive_float", "0", "0 is not a positive number"),
        ("positive_float", "nan", "nan is not a number from 0 to infinity"),
        ("non_negative_float", "inf", "inf is not a number from 0 to infinity"),
        ("non_negative_float", "-0.5", "-0.5 is not a number from 0 to infinity"),
        ("non_negative_float", "x", "'x' is not a number"),
        ("output_file", ".", "cannot write to .: it must be a file in a folder that exists"),
        ("output_file", "/dev/null", "cannot write to /dev/null: it must be a file"),
        ("output_file", "nowhere/a.pt", "cannot write to nowhere/a.pt"),
        ("checkpoint_file", "nowhere.pt", "there is no checkpoint nowhere.pt"),
        ("local_rank", "-2", "-2 is negative"),
        ("local_rank", "x", "'x' is not a whole number"),
    ],
)
def test_argument_out_of_range_refused(
    kind: str, text: str, words: str, support: ModuleType, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        getattr(support, kind)(text)
    assert words in str(refused.value)


def test_local_rank_of_minus_1_is_that_of_the_environment(
    support: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (support.local_rank("-1"), support.local_rank("1")) == (3, 1)
    monkeypatch.delenv("LOCAL_RANK")
    assert support.local_rank("-1") == 0


# --- the launcher's variables ---


def test_launched_tells_a_launcher_from_none(
    support: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not support.launched()
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert support.launched()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": ""}, "RANK is set in the environment, but WORLD_SIZE not"),
        ({"RANK": ""}, "WORLD_SIZE is set in the environment, but RANK not"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "but MASTER_ADDR and MASTER_PORT not"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment, which is no number"),
        ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE 2: ranks are numbered from 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0 in the environment: it counts processes"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999 in the environment: ports are"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 0 in the environment: ports are"),
    ],
)
def test_launched_by_half_refused(
    changes: dict[str, str],
    words: str,
    support: ModuleType,
    sentence: Callable[[int, Callable[[], Any]], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**LAUNCHED, **changes}.items():
        monkeypatch.setenv(name, value)
    assert words in sentence(2, support.launched)


def test_unknown_host_refused_after_a_while(
    support: ModuleType,
    sentence: Callable[[int, Callable[[], Any]], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def unknown(host: str, _port: object) -> None:
        asked.append(host)
        raise OSError("Name or service not known")

    monkeypatch.setattr(support.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(support.time, "sleep", lambda _: None)
    printed = sentence(2, lambda: support._look_up("nowhere", patience_s=0.01))
    assert "MASTER_ADDR is 'nowhere'" in printed and "Name or service not known" in printed
    assert len(asked) >= 2, "a name that was added a moment ago was refused"


# --- checkpoints ---


def test_checkpoint_written_is_read_and_nothing_else_is_left(
    support: ModuleType, tmp_path: Path
) -> None:
    state = {"epoch": 3, "settings": SETTINGS, "model": {"weight": torch.ones(2)}}
    support.save_checkpoint(tmp_path / "a.pt", state)
    support.save_checkpoint(tmp_path / "a.pt", {**state, "epoch": 4})
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    found = support.read_checkpoint(tmp_path / "a.pt", CPU, SETTINGS)
    assert found["epoch"] == 4 and torch.equal(found["model"]["weight"], torch.ones(2))


def test_checkpoint_written_to_a_link_keeps_the_link(support: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "a.pt").symlink_to(tmp_path / "disk" / "real.pt")
    support.write_file(support.output_file(str(tmp_path / "a.pt")), b"state")
    assert (tmp_path / "a.pt").is_symlink()
    assert (tmp_path / "disk" / "real.pt").read_bytes() == b"state"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real.pt"]


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Limits this process's file size. As on a full disk, write() fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_checkpoint_on_a_full_disk_keeps_the_one_before(
    support: ModuleType,
    sentence: Callable[[int, Callable[[], Any]], str],
    tmp_path: Path,
    small_disk: None,
) -> None:
    (tmp_path / "a.pt").write_bytes(b"before")
    state = {"epoch": 1, "settings": SETTINGS}
    printed = sentence(1, lambda: support.save_checkpoint(tmp_path / "a.pt", state))
    assert f"cannot write the checkpoint {tmp_path / 'a.pt'}: File too large" in printed
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.pt": b"before"}


def bad_checkpoints(folder: Path) -> dict[str, Path]:
    files = {name: folder / f"{name}.pt" for name in ("truncated", "foreign", "pickle", "other")}
    torch.save({"epoch": 1, "settings": SETTINGS, "model": torch.ones(1000)}, files["truncated"])
    files["truncated"].write_bytes(files["truncated"].read_bytes()[:2000])
    files["foreign"].write_text("not a checkpoint\n")
    files["pickle"].write_bytes(b"\x80\x04cos\nsystem\n.")  # a global that torch does not load
    torch.save({"state_dict": {}}, files["other"])
    return files


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("truncated", "truncated.pt is not a whole checkpoint of torch.save"),
        ("foreign", "foreign.pt is not a whole checkpoint of torch.save"),
        ("pickle", "pickle.pt is not a whole checkpoint of torch.save"),
        ("other", "other.pt is not a checkpoint of this script"),
    ],
)
def test_checkpoint_that_is_none_ends_in_a_sentence(
    name: str,
    words: str,
    support: ModuleType,
    sentence: Callable[[int, Callable[[], Any]], str],
    tmp_path: Path,
) -> None:
    path = bad_checkpoints(tmp_path)[name]
    assert words in sentence(1, lambda: support.read_checkpoint(path, CPU, SETTINGS))


@pytest.mark.parametrize("epoch", ["x", -5, True, 1.0])
def test_checkpoint_of_no_epoch_ends_in_a_sentence(
    epoch: object,
    support: ModuleType,
    sentence: Callable[[int, Callable[[], Any]], str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "damaged.pt"
    torch.save({"epoch": epoch, "settings": SETTINGS}, path)
    printed = sentence(1, lambda: support.read_checkpoint(path, CPU, SETTINGS))
    assert f"damaged.pt is damaged, its epoch is {epoch!r}" in printed


def test_checkpoint_with_other_settings_names_the_option(
    support: ModuleType, sentence: Callable[[int, Callable[[], Any]], str], tmp_path: Path
) -> None:
    path = tmp_path / "a.pt"
    support.save_checkpoint(path, {"epoch": 1, "settings": SETTINGS})
    printed = sentence(2, lambda: support.read_checkpoint(path, CPU, {"batch_size": 64}))
    assert "a.pt was trained with --batch-size 32, not 64" in printed


def test_checkpoint_of_another_model_ends_in_a_sentence(
    support: ModuleType, sentence: Callable[[int, Callable[[], Any]], str], tmp_path: Path
) -> None:
    def restore() -> None:
        with support.restoring(Path("a.pt")):
            torch.nn.Linear(2, 2).load_state_dict({"weight": torch.ones(3, 3)})

    assert "the state in a.pt does not fit" in sentence(1, restore)


def test_checkpoint_with_momentum_of_other_shapes_ends_in_a_sentence(
    support: ModuleType, sentence: Callable[[int, Callable[[], Any]], str]
) -> None:
    """torch loads such a state, and fails in the next step."""

    def trained(features: int) -> torch.optim.SGD:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(features))], momentum=0.9)
        optimizer.param_groups[0]["params"][0].grad = torch.ones(features)
        optimizer.step()
        return optimizer

    def restore(state: dict[str, Any]) -> None:
        with support.restoring(Path("a.pt")):
            support.load_optimizer(trained(2), state)

    restore(trained(2).state_dict())
    printed = sentence(1, lambda: restore(trained(3).state_dict()))
    assert "the state in a.pt does not fit" in printed


def test_memory_that_is_not_there_ends_in_a_sentence(
    support: ModuleType, sentence: Callable[[int, Callable[[], Any]], str]
) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    printed = sentence(1, lambda: support._end_by(raised.value))
    assert "there is not enough memory: choose smaller batches" in printed


def test_batches_larger_than_the_data_refused(
    support: ModuleType, sentence: Callable[[int, Callable[[], Any]], str]
) -> None:
    assert [len(batch) for batch in support.global_batches(10, 2, 2, epoch=0)] == [4, 4]
    printed = sentence(2, lambda: support.global_batches(10, 6, 2, epoch=0))
    assert "10 samples give 2 rank(s) no whole batch of 6: lower --batch-size to 5" in printed


# --- progress bars ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "rank", "shown"),
    [(Terminal(), 0, True), (Terminal(), 1, False), (io.StringIO(), 0, False)],
)
def test_progress_only_on_the_terminal_of_rank_0(
    stream: io.StringIO,
    rank: int,
    shown: bool,
    support: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(support.progress(range(3), "epoch 1", rank)) == [0, 1, 2]
    assert ("epoch 1" in stream.getvalue()) == shown


# --- scripts, from their command lines ---

NOWHERE = {"MASTER_ADDR": "", "MASTER_PORT": ""}
NO_PORT = {"MASTER_PORT": "abc"}
BAD_RUNS = [
    ("fp16_optimizer/main.py", ("--batch-size=2000",), {}, "no whole batch of 2000"),
    ("fp16_optimizer/main.py", ("--epochs=0",), {}, "--epochs: 0 is not a positive number"),
    ("fp16_optimizer/main.py", ("--checkpoint=.",), {}, "--checkpoint: cannot write to ."),
    ("imagenet/main.py", ("--loss-scale=nan",), {}, "--loss-scale: nan is not a number"),
    ("imagenet/main.py", ("--keep-batchnorm-fp32=True",), {}, "--keep-batchnorm-fp32 is for O2"),
    ("spawn/main.py", ("--dist-backend=nccl", "--no-cuda"), {}, "--dist-backend nccl is for GPUs"),
    ("syncbn/main.py", ("--batch=0",), {}, "--batch: 0 is not a positive number"),
    ("syncbn/main.py", ("--norm=local", "--batch=1"), {}, "needs 2 images per step, not 1"),
    ("syncbn/plot.py", ("--output=plot.abc",), {}, "--output plot.abc must end in one of"),
    ("snippets/simple_ddp_amp.py", (), {"RANK": "0"}, "RANK is set in the environment"),
    ("tutorial/mnist-mixed.py", ("-g=0",), {}, "-g/--gpus: 0 is not a positive number"),
    ("tutorial/mnist-mixed.py", ("-g=1",), NO_PORT, "MASTER_PORT is 'abc' in the environment"),
    ("tutorial/mnist-distributed.py", (), NO_PORT, "MASTER_PORT is 'abc' in the environment"),
    ("spawn/main.py", ("--dist-url=env://",), NO_PORT, "MASTER_PORT is 'abc' in the environment"),
    ("spawn/main.py", ("--checkpoint=.",), {}, "--checkpoint: cannot write to ."),
    ("spawn/main.py", ("--lr=nan",), {}, "--lr: nan is not a number"),
    ("spawn/main.py", ("--workers=-1",), {}, "--workers: -1 is negative"),
    ("spawn/main.py", ("--seed=-1",), {}, "--seed: -1 is negative"),
    ("spawn/main.py", (), {"NODE_RANK": "abc"}, "NODE_RANK is 'abc' in the environment"),
    ("spawn/main.py", ("--dist-url=foo://x",), {}, "--dist-url foo://x is none of tcp://"),
    ("spawn/main.py", ("--dist-url=tcp://h:99999",), {}, "--dist-url tcp://h:99999 is none of"),
    ("spawn/main.py", ("--dist-url=env://",), NOWHERE, "needs MASTER_ADDR and MASTER_PORT"),
    ("spawn/main.py", ("--dist-backend=foo",), {}, "--dist-backend: invalid choice: 'foo'"),
    ("spawn/main.py", ("--processes=2", "-b=1"), {}, "raise it to 2 or more"),
]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "arguments", "env", "words"),
    BAD_RUNS,
    ids=[" ".join((script, *arguments, *env)) for script, arguments, env, _ in BAD_RUNS],
)
def test_script_bad_input_ends_with_2_and_one_sentence(
    script: str, arguments: tuple[str, ...], env: dict[str, str], words: str, tmp_path: Path
) -> None:
    if script == "syncbn/plot.py":
        pytest.importorskip("matplotlib")
    done = train(script, tmp_path, *arguments, **env)
    assert done.returncode == 2, done.stderr
    assert_one_sentence(done, words)


@pytest.mark.processes
@pytest.mark.parametrize("script", ["fp16_optimizer/main.py", "imagenet/main.py", "mnist/main.py"])
def test_script_truncated_checkpoint_ends_with_1_and_one_sentence(
    script: str, tmp_path: Path
) -> None:
    path = bad_checkpoints(tmp_path)["truncated"]
    data = ("--synthetic=8",) if script.startswith("imagenet") else ()
    done = train(script, tmp_path, f"--resume={path}", *data)
    assert done.returncode == 1, done.stderr
    assert_one_sentence(done, f"main.py: {path} is not a whole checkpoint")


FAILS = """
import sys
sys.path.append({examples!r})
import example_support as support
import torch.multiprocessing as mp

@support.child_process
def train(index):
    raise ValueError("no more apples")

if __name__ == "__main__":
    support.run(lambda: mp.spawn(train, nprocs=1))
"""


@pytest.mark.processes
def test_spawned_process_that_fails_is_shown_once_and_leaves_no_file(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "job.py").write_text(FAILS.format(examples=str(EXAMPLES)))
    env = environment(TMPDIR=str(temporary))
    done = run_script(tmp_path / "job.py", cwd=tmp_path, env=env, timeout_s=TIMEOUT_S)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1 and "ValueError: no more apples" in done.stderr
    assert os.listdir(temporary) == []


KILLED = FAILS.replace(
    'raise ValueError("no more apples")', "os.kill(os.getpid(), signal.SIGKILL)"
).replace("import sys", "import os, signal, sys")


@pytest.mark.processes
def test_spawned_process_that_is_killed_is_named(tmp_path: Path) -> None:
    """As the kernel does when memory is short."""
    (tmp_path / "job.py").write_text(KILLED.format(examples=str(EXAMPLES)))
    done = run_script(tmp_path / "job.py", cwd=tmp_path, env=environment(), timeout_s=TIMEOUT_S)
    assert done.returncode == 137
    assert "job.py: process 0 was ended by SIGKILL." in done.stderr


WAITS = """
import sys
sys.path.append({examples!r})
import example_support as support
import torch.distributed as dist

def wait():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    print("waits", flush=True)
    store.get("what nobody sets")  # in C++, for minutes

support.run(wait)
"""


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_process_that_waits_for_others_ends_by_a_signal(number: int, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAITS.format(examples=str(EXAMPLES)))
    with subprocess.Popen(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A process started in the background ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "waits\n"
            process.send_signal(number)
            _, errors = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert f"job.py: stopped by {signal.Signals(number).name}.\n" in errors


def _in_a_shell(tmp_path: Path, say: str, behind: str) -> subprocess.CompletedProcess[str]:
    """Run ``say`` as the main function of an example, with ``behind`` after the command."""
    code = WAITS.partition("def wait")[0] + f"def say():\n    {say}\nsupport.run(say)\n"
    (tmp_path / "job.py").write_text(code.format(examples=str(EXAMPLES)))
    return subprocess.run(
        f"{sys.executable} job.py {behind}",
        shell=True,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.mark.processes
def test_output_that_nobody_reads_ends_quietly(tmp_path: Path) -> None:
    """As in `main.py | head -1`."""
    done = _in_a_shell(tmp_path, "while True: print('line')", "| head -1")
    assert (done.stdout, done.stderr) == ("line\n", "")


@pytest.mark.processes
def test_output_that_is_closed_is_no_error(tmp_path: Path) -> None:
    done = _in_a_shell(tmp_path, "print('line', file=sys.stdout)", ">&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_bar_that_a_signal_has_left_half_made_goes_quietly(
    support: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = support.Bar.__new__(support.Bar)
    bar.disable = False  # the first thing that tqdm's constructor sets
    del bar  # Python would print an error of its destructor
    assert capsys.readouterr().err == ""
