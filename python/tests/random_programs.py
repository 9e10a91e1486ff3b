# SPDX-License-Identifier: BSD-3-Clause
"""Shared by the generators of random programs: runs many programs, and shrinks failing ones."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Program = TypeVar("Program")  # has a seed and a world size


@dataclass
class Generator(Generic[Program]):
    """A kind of program."""

    draw: Callable[[int], Program]
    #: The failure of the first failing program, with its "program of seed S"; empty if none fails.
    run: Callable[[list[Program]], str]
    smaller: Callable[[Program], Iterable[Program]]
    show: Callable[[Program], str] = str
    batch: int = 50


def shrink(
    program: Program,
    smaller: Callable[[Program], Iterable[Program]],
    fails: Callable[[Program], bool],
    tries: int = 150,
) -> Program:
    """The smallest failing program that was found."""
    while True:
        for less in smaller(program):
            tries -= 1
            if tries < 0:
                return program
            if fails(less):
                program = less
                break
        else:
            return program


def arguments_of(description: str | None, worlds: tuple[int, ...] = ()) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", default="0:1000", help="A:B, or one seed")
    if worlds:
        parser.add_argument("--world", type=int, choices=worlds)
    parser.add_argument("--no-shrink", action="store_true")
    return parser


def search(generator: Generator[Any], arguments: argparse.Namespace) -> int:
    """Run all seeds, print the failing ones, and return whether any failed."""
    first, _, end = arguments.seeds.partition(":")
    seeds = range(int(first), int(end or int(first) + 1))
    failures, begin = 0, time.monotonic()
    for start in range(seeds.start, seeds.stop, 5 * generator.batch):
        part = range(start, min(start + 5 * generator.batch, seeds.stop))
        for program, message in _failing(generator, [generator.draw(seed) for seed in part]):
            failures += 1
            print(f"seed {program.seed} fails: {message[-3000:]}", flush=True)
            if not (arguments.no_shrink or message.startswith("only")):
                print(_smallest(generator, program, message), flush=True)
        took = time.monotonic() - begin
        print(f"to seed {part.stop}: {failures} failures, {took:.0f} s", flush=True)
    return 1 if failures else 0


def _failing(generator: Generator[Any], programs: list[Any]) -> Iterable[tuple[Any, str]]:
    """Run the programs in batches of one world size. Yields each failing program and its
    failure."""
    for world in sorted({program.world for program in programs}):
        todo = [program for program in programs if program.world == world]
        while todo:
            batch, todo = todo[: generator.batch], todo[generator.batch :]
            message = generator.run(batch)
            if message:
                seeds = [int(seed) for seed in re.findall(r"program of seed (\d+)", message)]
                at = next((i for i, program in enumerate(batch) if program.seed in seeds), None)
                if at is None:  # no rank reported it, for example because of a timeout
                    at = next((i for i, program in enumerate(batch) if generator.run([program])), 0)
                alone = generator.run([batch[at]])
                yield batch[at], alone or f"only after those before it: {message}"
                todo = batch[at + 1 :] + todo


def _smallest(generator: Generator[Any], program: Any, message: str) -> str:
    stuck = ": stuck" in message

    def fails(less: Any) -> bool:
        found = generator.run([less])
        return bool(found) and (": stuck" in found) == stuck

    program = shrink(program, generator.smaller, fails)
    return f"smallest:\n{generator.show(program)}\n{generator.run([program])}"
