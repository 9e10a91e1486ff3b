# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex.doctor`` checks this installation and this host, and recommends changes.

It prints versions, build options, cores, memory, limits, network interfaces and the interface that
Gloo uses. It compares batch norm with float64 on the CPU and on the GPU, and it measures
all-reduces between two processes that it starts on this host. This takes about twenty seconds. The
output ends with up to five recommendations, or "nothing to change".

In a job (``torchrun ... -m apex.doctor`` on every node) it compares and measures the ranks of the
job instead. It lists the differences between ranks, and names a slow pair of hosts. Rank 0 prints.

Exit code: 0 on success; 1 if a self-test or a measurement failed, or if the job's environment
variables are wrong; 2 for wrong arguments. In a job, rank 0 determines it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

import torch
import torch.distributed as dist

from apex._doctor import facts, here, job, measure, report, self_test
from apex._doctor.case import Case

_MOST_S = 1e6


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apex.doctor",
        description="Examines this installation and this host, or all hosts of a job, and "
        "recommends changes.",
        epilog="In a job: torchrun ... -m apex.doctor, on every node.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json", action="store_true", help="print facts, measurements and recommendations as JSON"
    )
    parser.add_argument(
        "--timeout-s",
        type=_positive,
        default=60.0,
        metavar="S",
        help="how many seconds to wait for ranks, and for what they measure (default: 60)",
    )
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= _MOST_S:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number up to {_MOST_S:g}")
    return value


def examine_host(environment: Mapping[str, str], timeout_s: float) -> report.Report:
    """A report on this host, with measurements between two processes that are started here."""
    mine = facts.gather(environment)
    backends = ["gloo", "apex"]
    if len(mine.gpus.names) > 1 and dist.is_nccl_available():
        backends.append("nccl")
    outcome = here.run(backends, timeout_s)
    case = Case(
        ranks=[mine],
        self_tests=_self_tests(mine),
        measured=outcome.measured,
        not_shared=_not_shared(outcome.measured, outcome.not_shared, environment),
    )
    return report.make(case, (), [outcome.problem] if outcome.problem else [])


def examine_job(environment: Mapping[str, str], timeout_s: float) -> report.Report | None:
    """A report on all ranks of the job; None on ranks other than 0.

    Raises:
        job.JobError: if this rank cannot take part.
    """
    mine = facts.gather(environment)
    record = job.Record(mine, _self_tests(mine))
    outcome = job.run(record, environment, timeout_s)
    if outcome is None:
        return None
    case = Case(
        ranks=[record.facts for record in outcome.records],
        self_tests=[test for record in outcome.records for test in record.self_tests],
        measured=outcome.measured,
        slow=outcome.slow,
    )
    if len(case.hosts) == 1:
        reason = _not_shared(outcome.measured, None, environment)
        case = Case(case.ranks, case.self_tests, case.measured, reason, case.slow)
    return report.make(case, outcome.links, [outcome.problem] if outcome.problem else [])


def _self_tests(mine: facts.Facts) -> Sequence[self_test.SelfTest]:
    rank = mine.place.rank
    tests = self_test.batch_norm(torch.device("cpu"), rank)
    if mine.gpus.own is not None and mine.build.with_cuda:
        # By default, a failing kernel would be replaced before the test could detect it.
        os.environ.setdefault("APEX_SYNC_BATCH_NORM", "apex")
        tests += self_test.batch_norm(torch.device("cuda", mine.gpus.own), rank)
    return tests


def _not_shared(
    measured: Sequence[measure.AllReduce], warning: str | None, environment: Mapping[str, str]
) -> str | None:
    """Why the backend `apex` did not share memory; None if it did, or if it was not measured."""
    if all(one.shares_memory is not False for one in measured):
        return None
    if environment.get("APEX_HOST_CHANNEL") == "0":
        return "APEX_HOST_CHANNEL=0"
    return warning or "a warning above says why"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code, or exit with 2 for wrong arguments."""
    args = build_parser().parse_args(argv)
    environment = dict(os.environ)
    try:
        examine = examine_job if job.is_job(environment) else examine_host
        found = examine(environment, args.timeout_s)
    except job.JobError as error:
        rank = f"rank {environment['RANK']}: " if environment.get("RANK") else ""
        _print(report.printable(f"apex.doctor: {rank}{error}."), sys.stderr)
        return 1
    if found is None:
        return 0
    text = report.as_text(found)
    if args.json:
        text = json.dumps(report.as_json(found), indent=2, allow_nan=False)
    _print(text, sys.stdout)
    return int(found.has_failed)


def _print(text: str, stream: TextIO) -> None:
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def command() -> int:
    """The entry point of a separate process: main() with the default SIGINT action."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        # Python's own handler does not run while torch waits for a peer.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return main()


if __name__ == "__main__":
    sys.exit(command())
