# SPDX-License-Identifier: BSD-3-Clause
"""Shared code of the examples: argument types, checkpoints, data, progress bars and exit codes.

This file's folder is not on a script's path, so each script appends it:

    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import example_support as support

Errors that a user can cause print one sentence on stderr that names the option or the file. The
exit code is 2 for a command line or an environment that cannot work, 1 for a later failure, and 128
+ the signal's number (Ctrl-C: 130) for a signal.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import io
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def fail(sentence: str) -> NoReturn:
    """Print the sentence and exit with code 1."""
    _end(sentence, 1)


def refuse(sentence: str) -> NoReturn:
    """Print the sentence and exit with code 2, for an invalid command line or environment."""
    _end(sentence, 2)


def _end(sentence: str, code: int) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr, flush=True)
    sys.exit(code)


try:
    from tqdm import tqdm
except ImportError:
    fail("the progress bars come with tqdm: run `pip install tqdm`.")


# --- argument types for argparse ---


def positive_int(text: str) -> int:
    return _whole_number(text, least=1, otherwise="is not a positive number")


def non_negative_int(text: str) -> int:
    return _whole_number(text, least=0, otherwise="is negative")


def local_rank(text: str) -> int:
    """A launcher's --local_rank. -1, the default of scripts for older launchers, means the value of
    the environment variable."""
    value = _whole_number(text, least=-1, otherwise="is negative")
    if value == -1:
        return non_negative_int(os.environ.get("LOCAL_RANK", "0"))
    return value


def seed(text: str) -> int:
    """A seed that generators accept, even after a number of epochs is added."""
    return _whole_number(text, least=0, otherwise="is negative")


def _whole_number(text: str, least: int, otherwise: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} {otherwise}")
    if value >= 2**62:  # torch's seeds have 64 bits, and callers may add a number
        raise argparse.ArgumentTypeError(f"{value} is too large: numbers are below 2**62")
    return value


def positive_float(text: str) -> float:
    value = non_negative_float(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def non_negative_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to infinity")
    if value > torch.finfo(torch.float32).max:
        raise argparse.ArgumentTypeError(f"{text} is too large for float32")
    return value


def output_file(text: str) -> Path:
    """A file that can be written. Other paths are refused before the first step, not after
    training."""
    path = Path(text)
    folder = path.resolve().parent
    if path.exists() and not path.is_file() or not folder.is_dir():
        raise argparse.ArgumentTypeError(
            f"cannot write to {path}: it must be a file in a folder that exists"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {path}: its folder is read-only")
    return path


def checkpoint_file(text: str) -> Path:
    """A checkpoint to continue from."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no checkpoint {path} to resume from")
    return path


def add_checkpoint_options(parser: argparse.ArgumentParser, write: str = "--checkpoint") -> None:
    """The option to write a checkpoint, and --resume."""
    parser.add_argument(
        write,
        type=output_file,
        metavar="PATH",
        help="write a checkpoint here after every epoch",
    )
    parser.add_argument(
        "--resume",
        type=checkpoint_file,
        metavar="PATH",
        help="continue from this checkpoint, with the settings of that run; every rank must be "
        "able to read it",
    )


# --- the place of this process in its job ---


def launched() -> bool:
    """Whether a launcher started this process, alone or with others.

    If only some of a launcher's variables are set, each process would train alone. This is refused.
    """
    there = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if not any(there.values()):
        return False
    there |= {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    missing = [name for name, value in there.items() if not value]
    if missing:
        given = "RANK" if there["RANK"] else "WORLD_SIZE"
        refuse(
            f"{given} is set in the environment, but {' and '.join(missing)} not: start the script "
            f"with torchrun, which sets all of them, or unset {given} to train in one process."
        )
    rank, size = (_number_in_environment(name) for name in ("RANK", "WORLD_SIZE"))
    if size == 0:
        refuse("WORLD_SIZE is 0 in the environment: it counts processes, from 1 on.")
    if rank >= size:
        refuse(f"RANK is {rank}, but WORLD_SIZE {size}: ranks are numbered from 0 to {size - 1}.")
    refuse_bad_address(size)
    return True


def _number_in_environment(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        refuse(f"{name} is {text!r} in the environment, which is no number: correct it.")
    return int(text)


def refuse_bad_address(processes: int) -> None:
    """Refuse a MASTER_ADDR and MASTER_PORT that do not work for this number of processes."""
    port = _number_in_environment("MASTER_PORT")
    if port > 65535 or port == 0 < processes - 1:
        refuse(f"MASTER_PORT is {port} in the environment: ports are numbers from 1 to 65535.")
    _look_up(os.environ["MASTER_ADDR"])


def _look_up(host: str, patience_s: float = 10) -> None:
    """Refuse an unknown host name, for which torch would retry for half an hour. Wait a few
    seconds, because a new name may take that long to become known."""
    end = time.monotonic() + patience_s
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > end:
                refuse(f"MASTER_ADDR is {host!r} in the environment, which is no host: {error}.")
        time.sleep(0.5)


def launch_alone_unless_launched() -> None:
    """Without a launcher, set the environment variables of a job with one process."""
    if not launched():
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def choose_device(local_rank: int, use_cuda: bool = True) -> torch.device:
    """The GPU of this process, made the current one, or the CPU if there is no GPU."""
    gpus = torch.cuda.device_count() if use_cuda else 0
    if gpus == 0:
        return torch.device("cpu")
    if local_rank >= gpus:
        refuse(
            f"local rank {local_rank} has no GPU of its own, this machine has {gpus}: start at "
            f"most {gpus} process(es) here."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


# --- data ---


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's digits: images [1797, 1, 8, 8] float32 in 0..1 and labels [1797] int64.

    Unless OMP_NUM_THREADS is set, this process then uses one thread, as with torchrun. The images
    are too small to benefit from several threads, which would wait for each other on busy cores.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        fail("the digits come with scikit-learn: run `pip install scikit-learn`.")
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return images, torch.tensor(labels, dtype=torch.int64)


def global_batches(count: int, batch_size: int, world_size: int, epoch: int) -> list[torch.Tensor]:
    """The samples of each step of an epoch over all ranks, [batch_size * world_size] each.

    Every rank gets the same batches and takes its slice. An incomplete last batch is dropped.
    """
    size = batch_size * world_size
    if size > count:
        refuse(
            f"{count} samples give {world_size} rank(s) no whole batch of {batch_size}: lower "
            f"--batch-size to {count // world_size} or less."
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    return list(order[: count // size * size].split(size))


# --- progress ---


class Bar(tqdm):
    """tqdm's bar, which tolerates that a signal ends the script while the bar is created."""

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # of an incomplete bar
            super().__del__()


def progress(steps: Iterable[Any] | None, title: str, rank: int, **options: Any) -> Bar:
    """tqdm's bar on rank 0's terminal. No bar if stderr is a file or a pipe."""
    # With disable=None, tqdm checks whether stderr is a terminal.
    hidden = None if rank == 0 else True
    return Bar(steps, desc=title, leave=False, disable=hidden, **{"unit": "step", **options})


# --- checkpoints ---


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write the state atomically: an interrupted write keeps the previous file."""
    data = io.BytesIO()
    torch.save(state, data)
    write_file(path, data.getbuffer(), "the checkpoint ")


def write_file(path: Path, data: bytes | memoryview, what: str = "") -> None:
    """Write a file atomically. A symbolic link is followed."""
    target = path.resolve()
    unfinished = target.with_name(target.name + ".part")
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
    except OSError as error:
        fail(f"cannot write {what}{path}: {error.strerror}.")
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def read_checkpoint(
    path: Path, device: torch.device, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Read a checkpoint of `save_checkpoint`, with its tensors on the device.

    Args:
        path: the file.
        device: the device of this process. Without it, all processes of a host would first load the
            tensors onto the device that they were saved from, GPU 0.
        settings: options that must equal those in the checkpoint's "settings".
    """
    try:
        data = io.BytesIO(path.read_bytes())
    except OSError as error:
        fail(f"cannot read the checkpoint {path}: {error.strerror}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about some contents of foreign files
            state = torch.load(data, map_location=device, weights_only=True)
    except Exception:  # errors of zipfile, pickle and torch vary with the file
        fail(f"{path} is not a whole checkpoint of torch.save: resume from another one.")
    known = state.get("settings") if isinstance(state, dict) else None
    if not isinstance(known, dict) or known.keys() != settings.keys() or "epoch" not in state:
        fail(f"{path} is not a checkpoint of this script: resume from one that it wrote.")
    if type(state["epoch"]) is not int or state["epoch"] < 0:
        fail(f"{path} is damaged, its epoch is {state['epoch']!r}: resume from another one.")
    for name, value in known.items():
        if value != settings[name]:
            option = "--" + name.replace("_", "-")
            refuse(
                f"{path} was trained with {option} {value}, not {settings[name]}: pass the same "
                "value to continue that run."
            )
    return state


@contextlib.contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Around calls of load_state_dict: exit if the state does not fit."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        fail(f"the state in {path} does not fit this script's model: resume from another one.")


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """load_state_dict() with a check of shapes. torch accepts any shape, and the next step would
    fail.

    Raises:
        ValueError: if a tensor does not have the shape of its parameter.
    """
    optimizer.load_state_dict(state)
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if torch.is_tensor(value) and value.dim() > 0 and value.shape != parameter.shape:
                raise ValueError(f"{name} has the shape {tuple(value.shape)}")


# --- the end ---


def run(main: Callable[[], None]) -> None:
    """Call main. A signal, a lost rank, a failed child process or a file error exits cleanly."""
    if sys.stdout is None:  # closed by the parent process
        sys.stdout = open(os.devnull, "w")
    owner = os.getpid()
    stopping = threading.Event()

    def stop(number: int, _frame: object) -> None:
        stopping.set()
        if os.getpid() != owner:  # a DataLoader's process, which handles it
            raise KeyboardInterrupt
        if os.environ.get("RANK", "0") == "0":
            name = signal.Signals(number).name
            print(f"{Path(sys.argv[0]).name}: stopped by {name}.", file=sys.stderr, flush=True)
        for process in mp.active_children():
            process.terminate()
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)  # a second signal ends the process immediately
        sys.exit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    _end_if_stuck(stopping)
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        sys.exit(1)
    except mp.ProcessExitedException as error:
        if error.exit_code < 0:  # otherwise the process has printed the reason
            name = signal.Signals(-error.exit_code).name
            message = f"process {error.error_index} was ended by {name}."
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code if error.exit_code > 0 else 128 - error.exit_code)
    except (RuntimeError, OSError) as error:
        _end_by(error)


def _end_if_stuck(stopping: threading.Event, patience_s: float = 3) -> None:
    """End a process that is stuck in C++, for example waiting for other ranks, and cannot run
    Python signal handlers. A thread ends it if a signal's handler has not begun after this time."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    # Otherwise a forked process, such as a DataLoader's, would report its own signals here.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def watch() -> None:
        while True:
            number = os.read(heard, 1)[0]
            if number in (signal.SIGINT, signal.SIGTERM) and not stopping.wait(patience_s):
                name = signal.Signals(number).name
                print(f"{Path(sys.argv[0]).name}: stopped by {name}.", file=sys.stderr, flush=True)
                os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()


def child_process(body: Callable[..., None]) -> Callable[..., None]:
    """Decorates a function for `mp.spawn`: a process that fails prints the reason itself.

    Otherwise mp.spawn would leave a file with the traceback in the temporary folder.
    """

    @functools.wraps(body)
    def reported(*args: Any) -> None:
        try:
            try:
                body(*args)
            except (RuntimeError, OSError) as error:
                _end_by(error)
        except Exception:
            traceback.print_exc()
            sys.exit(1)

    return reported


def _end_by(error: Exception) -> NoReturn:
    """Exit with a sentence for a lost rank, out of memory or a file error. Re-raise other
    errors."""
    if isinstance(error, dist.DistError):
        fail(str(error).strip().splitlines()[0])
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        fail("there is not enough memory: choose smaller batches, images or data.")
    if isinstance(error, OSError) and error.filename is not None:
        fail(f"{error.filename}: {error.strerror}.")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        fail(f"{error.strerror}: make room on the disk.")
    raise error
