# SPDX-License-Identifier: BSD-3-Clause
"""Train a small character model on lines of very different lengths.

    python main.py
    torchrun --nproc-per-node 2 main.py
    torchrun --nproc-per-node 3 main.py --micro-batches 2 --average plain

The loss is the mean over characters. Each step takes the same lines, for any number of ranks and
micro-batches, so the losses should be equal. With `--average weighted` they are. With `--average
plain`, each rank takes the mean over its own characters, as in a script written for one process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from apex.parallel import DistributedDataParallel as DDP

LINES_PER_STEP = 12
END = 0  # not a character of the text
TEXT = Path(__file__).resolve().parent / "text.txt"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A character model on lines of very different lengths.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--average", choices=("weighted", "plain"), default="weighted", help="of gradients"
    )
    parser.add_argument("--micro-batches", type=int, default=1, help="per rank and step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--output", type=Path, help="write the losses there, as JSON")
    arguments = parser.parse_args()
    if arguments.micro_batches < 1:
        parser.error("--micro-batches must be at least 1")
    return arguments


class CharacterModel(nn.Module):
    """Predicts the next character from the previous ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, 128)

    def forward(self, characters: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(characters))[0])


def padded(lines: list[str]) -> tuple[Tensor, Tensor]:
    """Characters and their successors, [lines, longest]. END follows the last one."""
    longest = max((len(line) for line in lines), default=1)
    inputs = torch.full((len(lines), longest), END)
    targets = torch.full((len(lines), longest), -1)  # -1: no target, padding
    for row, line in enumerate(lines):
        codes = torch.tensor([ord(character) for character in line])
        inputs[row, : len(line)] = codes
        targets[row, : len(line) - 1] = codes[1:]
        targets[row, len(line) - 1] = END
    return inputs, targets


def share_of(lines: list[str], part: int, parts: int) -> list[str]:
    """Adjacent lines of the sorted list, so one part has short lines and another has long ones."""
    each = (len(lines) + parts - 1) // parts
    return lines[part * each : (part + 1) * each]


def train_step(model: DDP, lines: list[str], arguments: argparse.Namespace) -> float:
    """Compute gradients of the mean over all characters of `lines`. Returns the mean loss."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = share_of(sorted(lines, key=len), rank, ranks)
    weighted = arguments.average == "weighted"
    total, count = torch.zeros(()), torch.zeros(())
    for number in range(arguments.micro_batches):
        inputs, targets = padded(share_of(mine, number, arguments.micro_batches))
        logits = model(inputs).transpose(1, 2)
        loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        characters = (targets >= 0).sum()
        last = number + 1 == arguments.micro_batches
        with contextlib.nullcontext() if last else model.no_sync():
            if weighted:
                with model.weight(characters):
                    loss.backward()
            else:
                (loss / characters.clamp(min=1) / arguments.micro_batches).backward()
        total, count = total + loss.detach(), count + characters
    both = torch.stack([total, count])
    dist.all_reduce(both)  # for the log; model.weighted_mean(total) gives the same
    return (both[0] / both[1]).item()


def main() -> None:
    arguments = parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    text = TEXT.read_text(encoding="ascii").splitlines()
    torch.manual_seed(0)
    model = DDP(
        CharacterModel(),
        gradient_average="weighted" if arguments.average == "weighted" else True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
    generator = torch.Generator().manual_seed(1)  # draws the same lines on every rank
    losses = []
    for step in range(arguments.steps):
        chosen = torch.randint(len(text), (LINES_PER_STEP,), generator=generator).tolist()
        losses.append(train_step(model, [text[i] for i in chosen], arguments))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and ((step + 1) % 25 == 0 or step + 1 == arguments.steps):
            recent = losses[step // 25 * 25 :]  # since the last line
            print(f"step {step + 1}: {sum(recent) / len(recent):.4f}", flush=True)
    if arguments.output is not None and dist.get_rank() == 0:
        arguments.output.write_text(json.dumps({"losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
