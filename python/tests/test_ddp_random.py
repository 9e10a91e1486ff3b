# SPDX-License-Identifier: BSD-3-Clause
"""Random training programs against one process in float64.

For hours: ``python python/tests/test_ddp_random.py --seconds 3600``. To repeat one case:
``python python/tests/test_ddp_random.py --seed 1234``.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

import pytest
from ddp_random_cases import run_seeds, world_of
from ddp_support import RankPool, RanksFailed

pytestmark = pytest.mark.processes

BATCH = 50
BATCH_TIMEOUT_S = 240
CASES = 250
# Every run has the same cases; --seconds draws others. APEX_TEST_SEED shifts them.
FIRST_SEED = int(os.environ.get("APEX_TEST_SEED", "20260000"))


def run_batch(pool: RankPool, seeds: list[int]) -> None:
    """Run cases of one world size. If they fail, find the first one that fails alone.

    Raises:
        RanksFailed: with the seed.
    """
    world = world_of(seeds[0])
    try:
        pool.run(world, run_seeds, seeds, timeout_s=BATCH_TIMEOUT_S)
    except RanksFailed as together:
        for seed in seeds:
            try:
                pool.run(world, run_seeds, [seed])
            except RanksFailed as alone:
                raise RanksFailed(f"seed {seed} fails: {alone}") from None
        raise RanksFailed(f"seeds {seeds} fail, but only together: {together}") from None


def batches(first: int, count: int) -> list[list[int]]:
    """Seeds from ``first`` on, in lists of one world size."""
    by_world: dict[int, list[int]] = {}
    for seed in range(first, first + count):
        by_world.setdefault(world_of(seed), []).append(seed)
    return [
        seeds[i : i + BATCH]
        for _, seeds in sorted(by_world.items())
        for i in range(0, len(seeds), BATCH)
    ]


@pytest.mark.parametrize(
    "seeds", batches(FIRST_SEED, CASES), ids=lambda s: f"world{world_of(s[0])}-seeds{s[0]}to{s[-1]}"
)
def test_random_programs_equal_one_process(ranks: RankPool, seeds: list[int]) -> None:
    run_batch(ranks, seeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--seed", type=int, help="run this case only")
    arguments = parser.parse_args()
    with RankPool(4) as pool:
        if arguments.seed is not None:
            pool.run(world_of(arguments.seed), run_seeds, [arguments.seed])
            print(f"seed {arguments.seed} passed")
            return 0
        first = random.SystemRandom().randrange(1 << 31)
        print(f"seeds from {first} on", flush=True)
        begin, done = time.monotonic(), 0
        while time.monotonic() - begin < arguments.seconds:
            for seeds in batches(first + done, 3 * BATCH):
                try:
                    run_batch(pool, seeds)
                except RanksFailed as failure:
                    print(failure)
                    return 1
            done += 3 * BATCH
            print(f"{done} cases passed in {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
