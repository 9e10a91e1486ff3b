# SPDX-License-Identifier: BSD-3-Clause
"""Starts a training script once per GPU, or once per core if there is no GPU.

    python -m apex.parallel.multiproc [options] main.py [arguments of main.py]

torchrun's agent runs the processes, and stops all of this node when one fails. It differs from
``torchrun`` in three ways, for scripts written for NVIDIA's Apex. ``--rank``, ``--world-size`` and
``--local_rank`` are appended (before a ``--``) if the script's source defines them. A
``--world-size N`` among the script's options sets the number of processes. Only rank 0 writes to
the terminal. Rank N writes to ``rank_N.log``, which is removed if it is empty after a job without a
failure.

The environment contains the variables of ``init_method="env://"``, and ``OMP_NUM_THREADS``, by
default the number of cores of the node divided by its processes. The exit code is that of the
process that failed first, 128 + N if signal N ended it or the launcher, or 2 for bad arguments.
"""

import argparse
import ast
import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import cuda
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from apex.parallel import _multiproc_child

#: Options that give a process its place in the job, and the environment variables of their values.
RANK_OPTIONS = {
    "--rank": "RANK",
    "--world-size": "WORLD_SIZE",
    "--world_size": "WORLD_SIZE",
    "--local_rank": "LOCAL_RANK",
    "--local-rank": "LOCAL_RANK",
}
_SHOWN_BYTES = 1 << 14  # of the log of a rank that failed


class RankLogs(LogsSpecs):
    """Rank 0 writes to the terminal, each other rank to its file in ``files``."""

    _root_log_dir: str
    root_log_dir = ""  # abstract, and not used by the agent

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        self.files = {r: Path(self._root_log_dir, f"rank_{r}.log") for r in ranks.values() if r > 0}
        stdouts = {local_rank: str(self.files.get(r, "")) for local_rank, r in ranks.items()}
        none = dict.fromkeys(envs, "")  # the child redirects stderr to stdout
        return LogsDest(stdouts=stdouts, stderrs=none, error_files=none)


def options_taken(script: Path) -> tuple[str, ...]:
    """The RANK_OPTIONS that the script's source passes to a method ``add_argument``."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if getattr(call.func, "attr", None) == "add_argument"]
    names = {a.value for call in calls for a in call.args if isinstance(a, ast.Constant)}
    return tuple(option for option in RANK_OPTIONS if option in names)


def appended(options: Sequence[str], before: Sequence[str]) -> tuple[str, ...]:
    """The first of these options for each value that the arguments `before` do not set."""
    given = {RANK_OPTIONS.get(argument.partition("=")[0]) for argument in before}
    by_value: dict[str, str] = {}
    for option in options:
        by_value.setdefault(RANK_OPTIONS[option], option)
    return tuple(option for value, option in by_value.items() if value not in given)


def world_size(before: Sequence[str]) -> int | None:
    """The number after the last ``--world-size``; None without one."""
    joined = "\0" + "\0".join(before) + "\0"
    found = re.findall(r"(?<=\0)--world[-_]size[=\0](\d+)(?=\0)", joined)
    return int(found[-1]) if found else None


def parse(argv: Sequence[str] | None, environment: Mapping[str, str]) -> argparse.Namespace:
    """The command line, with all values filled in. Exits with 2 for contradictory arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m apex.parallel.multiproc",
        usage="%(prog)s [options] script.py [arguments of script.py]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc", "--nproc-per-node", "--nproc_per_node", type=int, help="default: GPUs or cores"
    )
    parser.add_argument("--nnodes", type=int, default=1, help="nodes of the job (default: 1)")
    parser.add_argument("--node-rank", "--node_rank", type=int, default=0, help="node's rank")
    parser.add_argument(
        "--master-addr", "--master_addr", help="address of node 0 (several nodes: MASTER_ADDR)"
    )
    parser.add_argument(
        "--master-port", "--master_port", help="port of node 0 (several: MASTER_PORT or 29500)"
    )
    parser.add_argument("--timeout-s", type=int, default=600, help="wait for nodes (default: 600)")
    parser.add_argument("--log-dir", "--log_dir", default=".", help="folder of rank_<rank>.log")
    parser.add_argument(
        "--append", help="rank,world-size,local_rank or none (default: those the source defines)"
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    args.end = [*args.arguments, "--"].index("--")  # no argument after it is an option
    before = args.arguments[: args.end]
    world = world_size(before)
    if args.nproc is None:
        args.nproc = world // max(args.nnodes, 1) if world else cuda.device_count() or _cores()
    if args.nnodes > 1:
        args.master_addr = args.master_addr or environment.get("MASTER_ADDR")
        args.master_port = args.master_port or environment.get("MASTER_PORT", 29500)
    port = args.master_port = str(args.master_port or 0)  # 0 selects a free port
    chosen = [f"--{name}" for name in (args.append or "none").split(",") if name != "none"]
    options = chosen if args.append else options_taken(args.script)
    problems = {
        f"there is no script {args.script}": not args.script.is_file(),
        "--nproc and --timeout-s are at least 1": min(args.nproc, args.timeout_s) < 1,
        "--node-rank is 0 to --nnodes - 1": not 0 <= args.node_rank < args.nnodes,
        "several nodes need the --master-addr of node 0": args.nnodes > 1 and not args.master_addr,
        f"{port!r} is not a port number": not port.isdecimal() or int(port) > 65535,
        "--append takes rank, world-size, local_rank": {*options} - {*RANK_OPTIONS},
        "--world-size is not --nproc x --nnodes": world not in (None, args.nproc * args.nnodes),
    }
    for problem in (sentence for sentence, is_so in problems.items() if is_so):
        parser.error(problem)
    args.append = appended(options, before)
    return args


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def launch(args: argparse.Namespace) -> int:
    """Run the processes of this node and return the exit code. Call it on the main thread."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // args.nproc)))
    os.makedirs(args.log_dir, exist_ok=True)
    logs = RankLogs(args.log_dir)
    static = args.master_port != "0"
    config = LaunchConfig(
        min_nodes=args.nnodes,
        max_nodes=args.nnodes,
        nproc_per_node=args.nproc,
        run_id="multiproc",
        role="rank",
        rdzv_backend="static" if static else "c10d",
        rdzv_endpoint=f"{args.master_addr or '127.0.0.1'}:{args.master_port}",
        rdzv_configs={"timeout": args.timeout_s} | ({"rank": args.node_rank} if static else {}),
        local_addr=None if static else "127.0.0.1",
        max_restarts=0,
        logs_specs=logs,
    )
    append = " ".join(f"{option}={RANK_OPTIONS[option]}" for option in args.append)
    command = ["-I", _multiproc_child.__file__, append, str(1 + args.end), str(args.script)]
    command += args.arguments
    try:
        # the agent would substitute $
        elastic_launch(config, sys.executable)(*(part.replace("$", "$$") for part in command))
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        return _report(error, logs)
    for log in logs.files.values():
        with contextlib.suppress(OSError):  # another job may have removed it
            if log.stat().st_size == 0:
                log.unlink()
    return 0


def _report(error: ChildFailedError, logs: RankLogs) -> int:
    """Print the rank that failed first and the end of its log. Return its exit code."""
    rank, failure = error.get_first_failure()
    code, log = failure.exitcode, logs.files.get(rank)
    how = f"exit code {code}" if code > 0 else f"signal {failure.signal_name()}"
    lines = [f"multiproc: rank {rank} failed with {how}; see {log or 'above'}"]
    if log and log.is_file():
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _SHOWN_BYTES))
            shown = file.read().decode(errors="replace").splitlines()[-40:]
        lines += [f"  {line}" for line in shown]
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def main() -> int:
    """The command ``apex-launch``."""
    return launch(parse(None, os.environ))


if __name__ == "__main__":
    sys.exit(main())
