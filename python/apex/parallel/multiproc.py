# SPDX-License-Identifier: BSD-3-Clause
"""Start a training script once per GPU, or once per core where there is no GPU.

    python -m apex.parallel.multiproc [options] main.py [arguments of main.py]

It runs on torchrun's elastic agent, without restarts: when one process fails, the others are
stopped. The differences to ``torchrun`` are those that scripts written for NVIDIA's Apex rely on:
``--rank``, ``--world-size`` and ``--local_rank`` are appended for scripts that take them (see
:mod:`apex.parallel._multiproc.script` for how that is found out), a ``--world-size N`` among the
script's arguments is the number of processes, and only rank 0 writes to the terminal: the others
write to ``rank_<rank>.log``, in the current folder or that of ``--log-dir``.

Every process finds ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``
and ``MASTER_PORT`` in its environment, as ``init_process_group(init_method="env://")`` needs them,
and ``OMP_NUM_THREADS``, the machine's cores divided by the processes, unless it is set already.

Exit code: 0 if every process ended with 0; that of a failed process (128 + the signal's number if a
signal ended it); 128 + the number of the signal that stopped the launcher; 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from apex.parallel._multiproc import child, nodes, script

#: How much of a failed rank's log is shown, and of how many ranks.
TAIL_LINES = 40
TAIL_RANKS = 4

#: Where the nodes of a job meet unless told otherwise.
DEFAULT_PORT = 29500

#: What stops a job. The agent handles the same ones in the same way once it has processes.
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class LaunchError(Exception):
    """The job cannot start; the message is one sentence for the user."""


@dataclass(frozen=True)
class Job:
    """What to start on this node.

    Args:
        processes: on this node, at least 1.
        nodes: in the whole job, each with as many processes.
        node_rank: of this node, in 0..nodes-1.
        master: address and port of node 0, or None on a single node: any free port.
        timeout_s: how long to wait for the other nodes, in seconds.
        log_dir: folder of the files ``rank_<rank>.log``.
        script: the training script.
        arguments: what the script is given, the same on every rank.
        append: options that every process is given with a value of its own, as
            ``_multiproc.script.appended`` explains.
    """

    processes: int
    nodes: int
    node_rank: int
    master: tuple[str, int] | None
    timeout_s: int
    log_dir: Path
    script: Path
    arguments: tuple[str, ...]
    append: tuple[str, ...]

    def log_file(self, rank: int) -> Path | None:
        """Where this global rank writes; None: to the terminal."""
        return None if rank == 0 else self.log_dir / child.LOG_FILE.format(rank)

    def remove_empty_logs(self) -> None:
        """Of this node's ranks: those that have said nothing leave no file behind."""
        first = self.node_rank * self.processes
        for log in filter(None, map(self.log_file, range(first, first + self.processes))):
            with contextlib.suppress(OSError):
                if log.stat().st_size == 0:
                    log.unlink()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apex.parallel.multiproc",
        description="Starts a training script once per GPU, or once per core where there is no "
        "GPU, and stops all of them when one fails.",
        epilog="A --world-size N among the script's arguments is the number of processes, as in "
        "NVIDIA's Apex.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc",
        "--nproc-per-node",
        "--nproc_per_node",
        dest="nproc",
        type=_positive,
        metavar="N",
        help="processes on this node (default: its GPUs, or its cores if it has no GPU)",
    )
    parser.add_argument(
        "--nnodes", type=_positive, default=1, metavar="N", help="nodes of the job (default: 1)"
    )
    parser.add_argument(
        "--node-rank",
        "--node_rank",
        type=_whole_number,
        default=0,
        metavar="R",
        help="rank of this node, 0 to nnodes - 1 (default: 0)",
    )
    parser.add_argument(
        "--master-addr",
        "--master_addr",
        metavar="HOST",
        help="address of node 0 (default: MASTER_ADDR from the environment with several nodes, "
        "this machine with one)",
    )
    parser.add_argument(
        "--master-port",
        "--master_port",
        type=_port,
        metavar="PORT",
        help="a free port of node 0 (default: MASTER_PORT from the environment or "
        f"{DEFAULT_PORT} with several nodes, any free port with one)",
    )
    parser.add_argument(
        "--timeout-s",
        type=_positive,
        default=600,
        metavar="S",
        help="how many seconds to wait for the other nodes (default: 600)",
    )
    parser.add_argument(
        "--log-dir",
        "--log_dir",
        type=Path,
        default=Path("."),
        metavar="DIR",
        help="folder of the files rank_<rank>.log, where all ranks but 0 write their output and "
        "errors; after a job without a failure those that are empty are removed (default: the "
        "current folder)",
    )
    parser.add_argument(
        "--append",
        type=_append_choice,
        metavar="OPTIONS",
        help="which of --rank, --world-size, --local_rank to append to the script's arguments: "
        "names separated by commas, without dashes, or 'none' (default: those that the script's "
        "source passes to add_argument)",
    )
    parser.add_argument("script", type=Path, help="the training script")
    arguments = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments"
    )
    arguments.required = False  # else, before Python 3.12, a missing script is "script, ..."
    return parser


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _positive(text: str) -> int:
    value = _whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _port(text: str) -> int:
    value = _whole_number(text)
    if not 0 < value < 65536:
        raise argparse.ArgumentTypeError(f"{value} is not a port number")
    return value


def _append_choice(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    options = tuple("--" + name.strip().lstrip("-") for name in text.split(","))
    for option in options:
        if option not in script.RANK_OPTIONS:
            known = ", ".join(name[2:] for name in script.RANK_OPTIONS)
            raise argparse.ArgumentTypeError(f"{option[2:]!r} is none of {known}")
    return options


def plan(args: argparse.Namespace, environment: Mapping[str, str]) -> Job:
    """What the command line asks for, complete and free of contradictions.

    Raises:
        LaunchError: if it contradicts itself, or names what does not exist.
    """
    if not args.script.is_file():
        raise LaunchError(f"there is no script {args.script}.")
    if not 0 <= args.node_rank < args.nnodes:
        raise LaunchError(
            f"--node-rank {args.node_rank} is not one of {args.nnodes} nodes: "
            f"give each node its own rank from 0 to {args.nnodes - 1}."
        )
    master = _master(args, environment)
    takes = script.options_taken(args.script)
    arguments, world = script.split_world_size(
        args.arguments, keep=bool(takes & script.WORLD_SIZE_OPTIONS)
    )
    processes = args.nproc
    if world is not None:
        if world < 1 or world % args.nnodes:
            raise LaunchError(
                f"--world-size {world} cannot be divided over {args.nnodes} node(s): "
                "it is the number of processes of the whole job."
            )
        if processes is not None and processes * args.nnodes != world:
            raise LaunchError(
                f"--nproc {processes} on {args.nnodes} node(s) is not the script's "
                f"--world-size {world}: leave one of them out."
            )
        processes = world // args.nnodes
    if processes is None:
        processes = default_processes()
    _check_log_dir(args.log_dir)
    return Job(
        processes=processes,
        nodes=args.nnodes,
        node_rank=args.node_rank,
        master=master,
        timeout_s=args.timeout_s,
        log_dir=args.log_dir,
        script=args.script,
        arguments=tuple(arguments),
        append=script.appended(takes, arguments, args.append),
    )


def _master(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, int] | None:
    host, port = args.master_addr, args.master_port
    if args.nnodes == 1:
        if host is None and port is None:
            return None
        return host or "127.0.0.1", port or DEFAULT_PORT
    host = host or environment.get("MASTER_ADDR")
    if not host:
        raise LaunchError(
            f"{args.nnodes} nodes need to know where to meet: give every one of them the "
            "--master-addr of node 0."
        )
    if port is None:
        text = environment.get("MASTER_PORT", str(DEFAULT_PORT))
        try:
            port = _port(text)
        except argparse.ArgumentTypeError:
            raise LaunchError(
                f"MASTER_PORT is {text!r} in the environment, which is no port number: "
                "correct it, or give --master-port."
            ) from None
    return host, port


def _check_log_dir(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"cannot make the --log-dir {folder}: {error.strerror}.") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LaunchError(f"cannot write to the --log-dir {folder}: name another one.")


def default_processes() -> int:
    """One per visible GPU; without any, one per core that this process may use."""
    return torch.cuda.device_count() or _cores()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def launch(job: Job) -> int:
    """Run the job's processes of this node and wait for them; returns the exit code.

    Blocks, and must be called from the main thread, where signals arrive. While it runs, SIGINT,
    SIGTERM, SIGHUP and SIGQUIT stop the job.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // job.processes)))
    child.adopt_orphans()
    for number in STOPPING_SIGNALS:
        signal.signal(number, _raise_signal)
    with tempfile.TemporaryDirectory(prefix="apex_multiproc_") as folder:
        _write_command(job, Path(folder))
        command = [sys.executable, "-I", child.__file__, folder]
        try:
            if job.master is not None:
                nodes.reach(job.master, job.node_rank, job.timeout_s)
            with nodes.watch(job.master, job.nodes, job.node_rank, job.timeout_s):
                elastic_launch(_config(job, folder), command[0])(*command[1:])
            job.remove_empty_logs()
            return 0
        except ChildFailedError as error:
            child.end_orphans()
            return _report_failures(job, error.failures)
        except SignalException as stopped:
            return _stopped_by(stopped.sigval)
        except nodes.NotMet as error:
            _say(f"node {job.node_rank} could not meet the others: {error}.")
            return 1
        except dist.DistError as error:
            child.end_orphans()
            return _report_no_meeting(job, error)


def _config(job: Job, folder: str) -> LaunchConfig:
    address: str | None
    if job.master is None:
        backend, endpoint, address = "c10d", "localhost:0", "localhost"
        options: dict[str, object] = {"timeout": job.timeout_s}
    else:
        host, port = job.master
        backend, endpoint, address = "static", f"{host}:{port}", None
        options = {"timeout": job.timeout_s, "rank": job.node_rank}
    return LaunchConfig(
        min_nodes=job.nodes,
        max_nodes=job.nodes,
        nproc_per_node=job.processes,
        run_id=str(uuid.uuid4()) if job.master is None else "apex_multiproc",
        role="rank",
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs=options,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        local_addr=address,
    )


def _write_command(job: Job, folder: Path) -> None:
    """What `_multiproc.child` reads; a file, because the agent rewrites `$` in arguments."""
    command = {
        "launcher": os.getpid(),
        "command": [sys.executable, "-u", str(job.script), *job.arguments],
        "append": job.append,
        "log_dir": str(job.log_dir.absolute()),
    }
    (folder / child.COMMAND_FILE).write_text(json.dumps(command))


def _raise_signal(number: int, _frame: object) -> None:
    raise SignalException(f"signal {number}", signal.Signals(number))


def _stopped_by(number: int) -> int:
    # The processes are gone already; a second Ctrl-C must not interrupt the cleaning up.
    for each in STOPPING_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    child.end_orphans()
    reason = nodes.reason_to_stop()
    if reason is not None:
        _say(f"{reason} The processes of this node were stopped.")
        return 1
    _say(f"stopped by {signal.Signals(number).name}, and all processes with it.")
    return 128 + number


def _report_failures(job: Job, failures: Mapping[int, ProcessFailure]) -> int:
    """Say which ranks failed, and show the end of their logs; returns the exit code."""
    own = _not_stopped(failures)
    for rank in list(own)[:TAIL_RANKS]:
        log = job.log_file(rank)
        how = _how_it_ended(own[rank].exitcode)
        if log is None:
            _say(f"rank {rank} failed with {how}; its messages are above.")
            continue
        _say(f"rank {rank} failed with {how}; the end of {log}:")
        with contextlib.suppress(OSError):
            lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            print(*(f"  {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
    if len(own) > TAIL_RANKS:
        rest = ", ".join(map(str, list(own)[TAIL_RANKS:]))
        _say(f"ranks {rest} failed as well; their logs are in {job.log_dir}.")
    if job.processes * job.nodes > 1:
        _say("the other ranks were stopped.")
    code = next(iter(own.values())).exitcode
    return code if code > 0 else 128 - code


def _not_stopped(failures: Mapping[int, ProcessFailure]) -> Mapping[int, ProcessFailure]:
    """The failures that the agent did not cause itself, as far as exit codes tell.

    It ends the other ranks with SIGTERM, and after half a minute with SIGKILL; a SIGKILL is more
    often that of the kernel, which is out of memory.
    """
    for stopped in (-signal.SIGTERM, -signal.SIGKILL), (-signal.SIGTERM,):
        own = {rank: f for rank, f in failures.items() if f.exitcode not in stopped}
        if own:
            return own
    return failures


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def _report_no_meeting(job: Job, error: Exception) -> int:
    where = "this machine" if job.master is None else "{}:{}".format(*job.master)
    reason = str(error).strip().splitlines()[0]
    _say(
        f"node {job.node_rank} could not meet the others at {where} within {job.timeout_s} s; "
        f"check --master-addr, --master-port and that all {job.nodes} node(s) were started "
        f"({reason})."
    )
    return 1


def _say(sentence: str) -> None:
    print(f"multiproc: {sentence}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, or exits with 2 for bad arguments."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        job = plan(args, os.environ)
    except LaunchError as error:
        parser.exit(2, f"multiproc: {error}\n")
    return launch(job)


if __name__ == "__main__":
    sys.exit(main())
