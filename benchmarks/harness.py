# SPDX-License-Identifier: BSD-3-Clause
"""Shared code of the benchmarks: ranks as processes, statistics, machine data, tables, JSON."""

from __future__ import annotations

import argparse
import atexit
import datetime
import json
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = datetime.timedelta(seconds=120)


# --- ranks ---


def share_one_gpu(rank: int) -> None:
    """Let NCCL run several ranks on one GPU. Call it before the group is created.

    NCCL 2.30 has a switch for it. Earlier versions refuse two ranks with the same GPU on one host.
    So each rank claims to be another host, and they communicate over loopback sockets. This is for
    tests, not for measuring speed.
    """
    if torch.cuda.nccl.version()[:2] >= (2, 30):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
        os.environ["NCCL_NET"] = "Socket"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _join(backend: str, device: str, rank: int, world_size: int, init_method: str) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    options = {}
    if device == "cuda":
        count = torch.cuda.device_count()
        if backend == "nccl" and world_size > count:
            share_one_gpu(rank)
        torch.cuda.set_device(rank % count)
        if backend == "nccl":
            options["device_id"] = torch.device("cuda", rank % count)
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        **options,
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _child(
    rank: int,
    body: Callable[..., Any],
    backend: str,
    device: str,
    world_size: int,
    path: str,
    args: Any,
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _join(backend, device, rank, world_size, f"file://{path}/group")
    try:
        result = body(*args)
        if rank == 0:
            torch.save(result, f"{path}/result")
    finally:
        dist.destroy_process_group()


def run(
    body: Callable[..., Any], ranks: int, backend: str, device: str, args: Sequence[Any] = ()
) -> Any | None:
    """Run ``body(*args)`` in a process group and return rank 0's result (None on other ranks).

    Under a launcher (RANK is set) this process is one rank. Otherwise ``ranks`` processes are
    started.
    """
    if "RANK" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not dist.is_initialized():
            # Only once, because a launcher's store keeps the data of a destroyed group.
            _join(backend, device, rank, size, "env://")
            atexit.register(_leave)
        result = body(*args)
        return result if rank == 0 else None
    with tempfile.TemporaryDirectory() as path:
        mp.spawn(_child, (body, backend, device, ranks, path, tuple(args)), nprocs=ranks)
        return torch.load(f"{path}/result", weights_only=False)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Turns:
    """Times functions that take turns (A B C, B C A, ...), so that a disturbance affects all of
    them.

    A barrier precedes and follows each function. A time is that of the slowest rank. Every method
    is collective.
    """

    def __init__(self, device: str) -> None:
        self.synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.control = dist.new_group(backend="gloo")

    def timed(self, body: Callable[[], None]) -> float:
        """The duration of one call in seconds, on this rank."""
        self.synchronize()
        dist.barrier(self.control)
        start = time.perf_counter()
        body()
        self.synchronize()
        elapsed = time.perf_counter() - start
        dist.barrier(self.control)
        return elapsed

    def take(
        self, bodies: Sequence[Callable[[], None]], rounds: int, seconds: float
    ) -> list[list[float]]:
        """The times of each function: ``rounds`` of them, or fewer if ``seconds`` run out."""
        times: list[list[float]] = []
        begin = time.perf_counter()
        for i in range(rounds):
            row = [0.0] * len(bodies)
            for k in range(len(bodies)):
                index = (i + k) % len(bodies)
                row[index] = self.timed(bodies[index])
            times.append(row)
            over = torch.tensor(float(time.perf_counter() - begin > seconds))
            dist.all_reduce(over, op=dist.ReduceOp.MAX, group=self.control)
            if over.item() and len(times) >= 5:
                break
        return [list(column) for column in zip(*self.slowest(times), strict=True)]

    def slowest(self, times: Sequence[Sequence[float]]) -> list[list[float]]:
        """The elementwise maximum over all ranks."""
        largest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.control)
        return largest.tolist()


# --- numbers ---


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles. With fewer than four values, the extremes instead of quartiles."""
    if len(values) < 4:
        low, high = min(values), max(values)
    else:
        low, _, high = statistics.quantiles(values, n=4)
    return {"median": statistics.median(values), "q1": low, "q3": high, "count": len(values)}


def ratios(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Quartiles of value / base per round, so that a disturbance of both cancels out."""
    return quartiles([value / b for value, b in zip(values, base, strict=True)])


def show(quartile: dict[str, float], scale: float = 1.0, digits: int = 2) -> str:
    median, q1, q3 = (quartile[key] * scale for key in ("median", "q1", "q3"))
    return f"{median:.{digits}f} ({q1:.{digits}f}-{q3:.{digits}f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    rows = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


# --- the machine ---


def _first_line(path: str, key: str) -> str:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""


def _commit() -> str:
    """The commit, with "-dirty" if files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("describe", "--always") + ("-dirty" if changed else "")
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _command() -> str:
    """The command line as typed in the repository, without paths of this machine.

    A script that calls this one sets BENCHMARK_COMMAND to its own command line.
    """
    if "BENCHMARK_COMMAND" in os.environ:
        return os.environ["BENCHMARK_COMMAND"]
    script = Path(sys.argv[0]).resolve()
    if script.is_relative_to(ROOT):
        script = script.relative_to(ROOT)
    words = sys.argv[1:]
    if "--output" in words:
        at = words.index("--output")
        words = words[:at] + words[at + 2 :]
    return shlex.join(["python", str(script), *words])


def machine() -> dict[str, Any]:
    """The data needed to interpret a result: processor, memory, GPU, versions, load, command
    line."""
    import apex._build_info as build

    memory = _first_line("/proc/meminfo", "MemTotal").split()
    described: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        "commit": _commit(),
        "processor": _first_line("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_gb": round(int(memory[0]) / 1e6, 1) if memory else None,
        "load_at_start": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "apex": build.version,
        "threads_per_rank": int(os.environ.get("OMP_NUM_THREADS", "1")),
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
        described["cuda"] = torch.version.cuda
        described["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return described


def warn_if_busy(described: dict[str, Any]) -> None:
    if described["load_at_start"] > 0.5:
        print(
            f"PROVISIONAL: the load was {described['load_at_start']:.1f} at the start; something "
            "else is running, so these numbers are not for publication.",
            flush=True,
        )


# --- the command line and the output ---


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def write(name: str, result: dict[str, Any], folder: str | None) -> None:
    """Write ``result`` as NAME.json into ``folder``, if there is one."""
    if folder is None:
        return
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwrote {path}")


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """The arguments of every benchmark that runs models in several processes."""
    parser.add_argument(
        "--ranks", type=positive_int, default=2, help="processes (a launcher's number wins)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", choices=["gloo", "nccl", "mpi"], default="gloo")
    parser.add_argument("--output", help="folder for NAME.json (default: only print)")
    parser.add_argument("--name", default=name, help="file name without suffix")
    parser.add_argument("--link", help="what joins the hosts, in words, for the record")


def run_models(
    arguments: argparse.Namespace,
    titles: dict[str, str],
    measure: Callable[..., Any],
    options: tuple[Any, ...],
    report: Callable[[dict[str, Any]], str],
) -> None:
    """Run ``measure(model, *options)`` on all ranks for each model, and report rank 0's results."""
    described = machine()
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    results: list[dict[str, Any]] = []
    complete = {"machine": described, "settings": settings, "titles": titles, "results": results}
    for model in arguments.models:
        # A new process group per model, so that a model does not affect the next one.
        outcome = run(
            measure, arguments.ranks, arguments.backend, arguments.device, (model, *options)
        )
        if outcome is None:
            continue
        results.append(outcome)
        print(report(outcome), flush=True)
    if results:  # rank 0
        write(arguments.name, complete, arguments.output)
        warn_if_busy(described)
