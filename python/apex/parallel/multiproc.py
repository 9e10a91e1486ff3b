# SPDX-License-Identifier: BSD-3-Clause
"""Starts a training script once per GPU, or once per core if there is no GPU.

    python -m apex.parallel.multiproc [options] main.py [arguments of main.py]

torchrun's agent runs the processes, and stops all of them when one fails. It differs from
``torchrun`` in three ways, for scripts written for NVIDIA's Apex. ``--rank``, ``--world-size`` and
``--local_rank`` are appended (before a ``--``) if the script's source defines them. A
``--world-size N`` among the script's options sets the number of processes. Only rank 0 writes to
the terminal. Rank N writes to ``rank_N.log``, which is removed if it is empty after a job without a
failure.

If a launcher is killed, the kernel kills its ranks (Linux). The loss of node 0 stops all nodes.

The environment contains the variables of ``init_method="env://"``, and ``OMP_NUM_THREADS``, by
default the number of cores of the node divided by its processes. The exit code is that of a failed
process, 128 + N if signal N ended that process or the launcher, or 2 for bad arguments.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from torch import cuda
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from apex.parallel._multiproc import child, script

_FAILED_NODE = "apex_multiproc/failed_node"
_SHOWN_BYTES = 1 << 16  # of the log of a rank that failed


class RankLogs(LogsSpecs):
    """Rank 0 writes to the terminal, each other rank to its file in ``files``."""

    _root_log_dir: str
    root_log_dir = ""  # abstract, and not used by the agent

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        self.files = {r: Path(self._root_log_dir, f"rank_{r}.log") for r in ranks.values() if r > 0}
        stdouts = {local_rank: str(self.files.get(r, "")) for local_rank, r in ranks.items()}
        none = dict.fromkeys(envs, "")  # child.py redirects stderr to stdout
        return LogsDest(stdouts=stdouts, stderrs=none, error_files=none)


class Rendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous. Port 0 selects a free port. A node that fails stops the others.

    Without that, ranks of other nodes would wait for a lost peer until their process group times
    out.
    """

    _store: TCPStore
    finished = False  # node 0's ranks have finished, so its launcher and the store may end

    def _failed_node(self) -> bytes | None:
        return self._store.get(_FAILED_NODE) if self._store.check([_FAILED_NODE]) else None

    def next_rendezvous(self) -> RendezvousInfo:
        info = super().next_rendezvous()
        where = RendezvousStoreInfo(self.master_addr, self._store.port)
        return RendezvousInfo(info.store, info.rank, info.world_size, where)

    def num_nodes_waiting(self) -> int:
        """Called by the agent each time that it polls its processes."""
        try:
            failed = self._failed_node()
            self.finished = self.finished or self._store.check(["finished/0"])
        except DistError:
            failed = None if self.finished else b"0"  # node 0's launcher hosts the store
        if failed:
            raise DistError(f"node {failed.decode()} has failed")
        return 0

    def wait_for_nodes(self, limit_s: float) -> None:
        """Waits for the ranks of all nodes. Polls, since a signal doesn't end the store's wait."""
        end, failed = time.monotonic() + limit_s, None
        with contextlib.suppress(DistError):  # node 0's launcher has ended before its time
            for step in "finished", "left":
                self._store.set(f"{step}/{self.rank}", "")
                nodes = [f"{step}/{rank}" for rank in range(self.world_size)]
                waits = step == "finished" or self.rank == 0  # it hosts the store, and exits last
                while waits and not (failed or self._store.check(nodes)) and time.monotonic() < end:
                    time.sleep(0.1)
                    failed = self._failed_node()
        if failed:
            raise DistError(f"node {failed.decode()} has failed")

    def report_failure(self) -> None:
        """Stop the other nodes. Node 0 keeps the store alive for 10 s, so that they can read it."""
        with contextlib.suppress(DistError):
            if self._store is not None:
                # only the first failed node is reported
                self._store.compare_set(_FAILED_NODE, "", str(self.rank))
                self._store.set(f"stopped/{self.rank}", "")
                if self.rank == 0:
                    others = [f"stopped/{rank}" for rank in range(self.world_size)]
                    self._store.wait(others, timedelta(seconds=10))


class Agent(LocalElasticAgent):
    """torchrun's agent, without its five minutes of waiting for the other nodes at the end."""

    failed: Sequence[int] = ()  # the ranks that failed before the agent stopped the others
    _grace_s = 30

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        codes = {w.global_rank: handlers[w.local_rank].proc.poll() for w in worker_group.workers}
        self.failed = [rank for rank, code in codes.items() if code]
        return super()._monitor_workers(worker_group)  # type: ignore[no-any-return]

    def _shutdown(
        self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None
    ) -> None:
        """Called again for a second signal, which shortens the wait for the processes."""
        timeout, self._grace_s = self._grace_s, 1
        super()._shutdown(death_sig, timeout)

    def _exit_barrier(self) -> None:
        meeting = self._worker_group.spec.rdzv_handler
        assert isinstance(meeting, Rendezvous)
        meeting.wait_for_nodes(self._exit_barrier_timeout)


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
    world = script.world_size(args.arguments)
    if args.nproc is None:
        args.nproc = world // max(args.nnodes, 1) if world else cuda.device_count() or _cores()
    if args.nnodes > 1:
        args.master_addr = args.master_addr or environment.get("MASTER_ADDR")
        args.master_port = args.master_port or environment.get("MASTER_PORT", 29500)
    port = args.master_port = str(args.master_port or 0)  # 0 selects a free port
    chosen = [f"--{name}" for name in (args.append or "none").split(",") if name != "none"]
    options = chosen if args.append else script.options_taken(args.script)
    problems = {
        f"there is no script {args.script}": not args.script.is_file(),
        "--nproc and --timeout-s are at least 1": min(args.nproc, args.timeout_s) < 1,
        "--node-rank is 0 to --nnodes - 1": not 0 <= args.node_rank < args.nnodes,
        "several nodes need the --master-addr of node 0": args.nnodes > 1 and not args.master_addr,
        f"{port!r} is not a port number": not port.isdecimal() or int(port) > 65535,
        "--append takes rank, world-size, local_rank": {*options} - {*script.RANK_OPTIONS},
        "--world-size is not --nproc x --nnodes": world not in (None, args.nproc * args.nnodes),
    }
    for problem in (sentence for sentence, is_so in problems.items() if is_so):
        parser.error(problem)
    args.append = script.appended(options, args.arguments)
    return args


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def launch(args: argparse.Namespace) -> int:
    """Run the processes of this node and return the exit code. Call it on the main thread."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // args.nproc)))
    # Ctrl-C ends a launcher that waits for other nodes. Once processes run, the agent handles
    # signals.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    child.prctl(child.PR_SET_CHILD_SUBREAPER, 1)
    master = args.master_addr or "127.0.0.1", int(args.master_port)
    meeting = Rendezvous(*master, args.node_rank, args.nnodes, "multiproc", args.timeout_s)
    logs = RankLogs(args.log_dir)
    append = " ".join(f"{option}={script.RANK_OPTIONS[option]}" for option in args.append)
    end = str(1 + script.options_end(args.arguments))  # the script is the first part
    command = ("-I", child.__file__, str(os.getpid()), append, end, str(args.script))
    command += tuple(args.arguments)
    spec = WorkerSpec(
        role="rank",
        local_world_size=args.nproc,
        entrypoint=sys.executable,
        args=tuple(part.replace("$", "$$") for part in command),  # the agent would substitute $
        rdzv_handler=meeting,
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        os.makedirs(args.log_dir, exist_ok=True)
        agent = Agent(spec, logs)
        failures = agent.run().failures
        if not failures:
            for log in logs.files.values():
                with contextlib.suppress(OSError):  # another job may have removed it
                    if log.stat().st_size == 0:
                        log.unlink()
            return 0
        failed = agent.failed or list(failures)[:1]
        code, reason = _report(failures, failed, logs), "a rank of this node has failed"
    except SignalException as stopped:
        code, reason = 128 + stopped.sigval, f"stopped by {stopped.sigval.name}"
    except (OSError, DistError) as error:
        code, reason = 1, f"node {args.node_rank}: {str(error).splitlines()[0]}"
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT:
        signal.signal(number, signal.SIG_IGN)  # the cleanup takes seconds
    meeting.report_failure()
    child.kill_children()
    _print(f"multiproc: {reason}; all processes of this node have ended.")
    return code


def _report(failures: Mapping[int, ProcessFailure], failed: Sequence[int], logs: RankLogs) -> int:
    """Print the failed ranks and the end of their logs, and return the exit code."""
    for rank in sorted(failures, key=lambda rank: rank not in failed):
        code, log = failures[rank].exitcode, logs.files.get(rank)
        # The agent stops the others: with SIGTERM, and after 30 s with SIGKILL.
        if rank not in failed and -code in (signal.SIGTERM, signal.SIGKILL):
            continue
        verb = "failed" if rank in failed else "was stopped, and ended"
        name = failures[rank].signal_name().replace("<N/A>", str(-code))
        how = f"exit code {code}" if code > 0 else f"signal {name}"
        _print(f"multiproc: rank {rank} {verb} with {how}; see {log or 'above'}")
        if log and log.is_file():
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _SHOWN_BYTES))
                lines = file.read().decode(errors="replace").splitlines()[-40:]
            _print(*(f"  {line}" for line in lines))
    code = failures[failed[0]].exitcode
    return code if code > 0 else 128 - code


def _print(*lines: str) -> None:
    """Writes to stderr, whose reader may have ended: the exit code stays the same."""
    try:
        print(*(f"{line}\n" for line in lines), sep="", end="", file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # for output that is still buffered


def main() -> int:
    """The command ``apex-launch``."""
    return launch(parse(None, os.environ))


if __name__ == "__main__":
    sys.exit(main())
