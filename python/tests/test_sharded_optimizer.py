# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer against the plain optimizer.

More cases: ``python python/tests/test_sharded_optimizer.py --cases 1000``.
"""

from __future__ import annotations

import argparse
import sys

import pytest
from ddp_support import RankPool
from sharded_cases import run_seeds

CASES = 40


def _run(pool: RankPool, first: int, count: int) -> None:
    for world in (1, 2, 3, 4):
        seeds = [seed for seed in range(first, first + count) if seed % 4 == world - 1]
        for begin in range(0, len(seeds), 25):
            pool.run(world, run_seeds, seeds[begin : begin + 25], timeout_s=240)


def test_sharded_optimizer_random_programs_step_as_the_plain_one_does(ranks: RankPool) -> None:
    _run(ranks, 0, CASES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    args = parser.parse_args()
    with RankPool() as pool:
        _run(pool, args.first, args.cases)
    print(f"{args.cases} cases from {args.first} on: all agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
