# SPDX-License-Identifier: BSD-3-Clause
"""Shared code of the examples: the place in a job, data, progress bars and checkpoints.

This file's folder is not on a script's path, so each script appends it:

    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import example_support as support
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch


def fail(sentence: str) -> NoReturn:
    """Print the sentence on stderr and exit with code 1."""
    sys.exit(f"{Path(sys.argv[0]).name}: {sentence}")


try:
    from tqdm import tqdm
except ImportError:
    fail("the progress bars come with tqdm: run `pip install tqdm`.")


# --- options ---


def add_local_rank(parser: argparse.ArgumentParser) -> None:
    """torch.distributed.launch passes --local-rank=R (older versions: --local_rank=R)."""
    parser.add_argument(
        "--local-rank", "--local_rank", type=_local_rank, default="-1", metavar="R",
        help="index of this process on its machine; -1: LOCAL_RANK, which launchers set, or 0",
    )  # fmt: skip


def _local_rank(text: str) -> int:
    return int(os.environ.get("LOCAL_RANK", "0")) if int(text) == -1 else int(text)


def add_checkpoint_options(parser: argparse.ArgumentParser, write: str = "--checkpoint") -> None:
    """The option to write a checkpoint, and --resume."""
    parser.add_argument(write, type=Path, metavar="PATH", help="written after every epoch")
    parser.add_argument(
        "--resume", type=Path, metavar="PATH",
        help="continue from this checkpoint, with the settings of that run; every rank must be "
        "able to read it",
    )  # fmt: skip


# --- the place of this process in its job ---


def launched() -> bool:
    """Whether a launcher started this process, alone or with others."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


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
        fail(f"local rank {local_rank} has no GPU: start at most {gpus} process(es) here.")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


# --- data ---


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's digits: images [1797, 1, 8, 8] float32 in 0..1 and labels [1797] int64.

    Unless OMP_NUM_THREADS is set, this process then uses one thread, as with torchrun.
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


def split_digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """1,437 training and 360 test digits; the split is stratified by digit, always the same."""
    images, labels = digits()
    from sklearn.model_selection import train_test_split

    kept, held_out = train_test_split(
        range(len(labels)), test_size=360, random_state=0, stratify=labels
    )
    return (images[kept], labels[kept]), (images[held_out], labels[held_out])


def global_batches(count: int, batch_size: int, world_size: int, epoch: int) -> list[torch.Tensor]:
    """The samples of each step of an epoch over all ranks, [batch_size * world_size] each.

    Every rank gets the same batches and takes its slice. An incomplete last batch is dropped.
    """
    size = batch_size * world_size
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    return list(order[: count // size * size].split(size))


def progress(steps: Iterable[Any] | None, title: str, rank: int, **options: Any) -> tqdm:
    """tqdm's bar on rank 0's terminal. No bar if stderr is a file or a pipe."""
    hidden = None if rank == 0 else True  # with None, tqdm checks whether stderr is a terminal
    return tqdm(steps, desc=title, leave=False, disable=hidden, **{"unit": "step", **options})


# --- checkpoints ---


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write the state atomically: an interrupted write keeps the previous file."""
    unfinished = path.with_name(path.name + ".part")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def read_checkpoint(
    path: Path, device: torch.device, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Read a checkpoint of `save_checkpoint`, with its tensors on the device.

    Without a device, all processes of a host would first load the tensors onto the device that they
    were saved from, GPU 0. `settings` must equal those in the checkpoint's "settings".
    """
    state = torch.load(path, map_location=device, weights_only=True)
    for name, value in state["settings"].items():
        if value != settings[name]:
            option = "--" + name.replace("_", "-")
            fail(f"{path} was trained with {option} {value}, not {settings[name]}.")
    return state
