# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex.doctor`` checks this installation and this host, and recommends changes.

It prints versions, build options, cores, memory and GPUs, compares batch norm with float64, and
measures all-reduces between two processes that it starts. The exit code is 1 if batch norm is wrong
or the two processes fail.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from apex import _build_info
from apex.__main__ import summary
from apex._check import REBUILD
from apex.parallel import SyncBatchNorm

#: Largest error by dtype, relative to the largest value of a result: a few roundings of the dtype.
_TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
_EPS, _MOMENTUM, _TIMEOUT_S = 1e-5, 0.1, 60.0
_SMALL, _LARGE, _GIB = 4 << 10, 32 << 20, 1 << 30  # bytes; the first two are all-reduced


@dataclass
class Host:
    """What the rules read.

    gpu_files: the number of files /dev/nvidia<number>.
    cores: the number of cores that this process may use, by affinity and CPU limit.
    shm: the size of /dev/shm in bytes; None if it does not exist.
    batch_norm: the largest relative error, NaN if an operator failed, and its limit.
    all_reduce: latency in seconds and bytes per second, by backend.
    shares_memory: whether the backend ``apex`` used shared memory; None if not measured.
    """

    gpu_files: int
    gpus: tuple[str, ...]
    cores: int
    threads: int
    available: int
    total: int
    shm: int | None
    batch_norm: dict[str, tuple[float, float]] = field(default_factory=dict)
    all_reduce: dict[str, tuple[float, float]] = field(default_factory=dict)
    shares_memory: bool | None = None
    problem: str | None = None  # why the two processes failed

    @property
    def wrong(self) -> list[str]:
        """Where batch norm is wrong."""
        return [name for name, (error, most) in self.batch_norm.items() if not error <= most]


def look() -> Host:
    """Gather the facts that need no measurement."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    cores = float(len(os.sched_getaffinity(0)))
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.is_file():
        quota, period = limit.read_text().split()
        cores = cores if quota == "max" else min(cores, int(quota) / int(period))
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Host(
        gpu_files=sum(bool(re.fullmatch(r"nvidia\d+", f.name)) for f in Path("/dev").iterdir()),
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        cores=max(1, int(cores)),
        threads=torch.get_num_threads(),
        available=kib["MemAvailable"] << 10,
        total=kib["MemTotal"] << 10,
        shm=None if shm is None else shm.f_frsize * shm.f_blocks,
    )


def recommend(host: Host) -> Iterator[str]:
    """What to change, most important first."""
    if host.wrong:
        yield f"batch norm is wrong for {', '.join(host.wrong)}: report it with this output."
    present = max(host.gpu_files, len(host.gpus))
    if present and torch.version.cuda is None:
        yield f"there are GPUs, and this torch is a CPU build: install torch for CUDA, {REBUILD}."
    elif present and not host.gpus:
        yield "torch sees none of the GPUs: check CUDA_VISIBLE_DEVICES and nvidia-smi."
    elif present and not _build_info.with_cuda:
        yield f"apex has no CUDA parts ({_build_info.cuda_reason}): install nvcc, {REBUILD}."
    if host.shares_memory is False:
        yield "two processes share no memory: the warning above says why, see docs/backend.md."
    if host.threads > host.cores:
        yield f"a process has {host.threads} threads for {host.cores} cores: set OMP_NUM_THREADS."
    if host.available < max(_GIB // 2, host.total // 20):
        yield f"{host.available / _GIB:.1f} GiB of memory are available: end other programs."
    if host.shm is not None and host.shm < _GIB // 4:
        size = f"/dev/shm has {host.shm >> 20} MiB, and DataLoader workers send batches through it"
        yield f"{size}: docker run --shm-size=8g, or --ipc=host."


def describe(host: Host) -> Iterator[str]:
    """The report, line by line."""
    rows = {
        "torch": f"{torch.__version__}, Python {platform.python_version()}",
        "GPUs": ", ".join(host.gpus) or "none that torch can use",
        "cores": f"{host.cores} of {os.cpu_count()}, threads a process: {host.threads}, "
        f"{torch.backends.cpu.get_cpu_capability()}, load {os.getloadavg()[0]:.1f}",
        "memory": f"{host.available / _GIB:.1f} of {host.total / _GIB:.1f} GiB available, /dev/shm "
        + ("does not exist" if host.shm is None else f"{host.shm / _GIB:.2f} GiB"),
    }
    yield f"apex.doctor on {socket.gethostname()}\n{summary()}"
    yield from (f"  {name:<13} {text}" for name, text in rows.items())
    yield "batch norm against float64, largest error"
    for name, (error, most) in host.batch_norm.items():
        yield f"  {name:<18} {error:.1e} ({'passed' if error <= most else 'FAILED'})"
    busy = " (under load)" if os.getloadavg()[0] > host.cores / 2 else ""
    yield f"all-reduce, two processes here{busy}"
    for name, (latency, speed) in host.all_reduce.items():
        shared = " in shared memory" if name == "apex" and host.shares_memory else ""
        yield f"  {name:<5} 4 KiB {latency * 1e6:.0f} us, 32 MiB {speed / 1e9:.2f} GB/s{shared}"
    if host.problem is not None:
        yield f"failed: {host.problem}."
    advice = list(recommend(host))
    yield from (f"{number}. {one}" for number, one in enumerate(advice, 1))
    if not advice and not host.problem:
        yield "nothing to change"


def check_batch_norm(device: torch.device) -> dict[str, tuple[float, float]]:
    """The largest relative error of forward and backward, and its limit, by dtype."""
    found = {}
    for name, most in _TOLERANCES.items():
        formats = (torch.contiguous_format, torch.channels_last)
        try:
            errors = [e for one in formats for e in _errors(device, getattr(torch, name), one)]
        except RuntimeError as error:
            print(f"apex.doctor: {error}", file=sys.stderr)
            errors = [math.nan]
        largest = max(errors) if all(map(math.isfinite, errors)) else math.nan
        found[f"{name} on {device}"] = (largest, most)
    return found


def _errors(
    device: torch.device, dtype: torch.dtype, layout: torch.memory_format
) -> Iterator[float]:
    draws = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, device="cpu", generator=draws)

    channels = 24
    x = (2 * draw(16, channels, 9, 7) + 3).to(device, dtype).contiguous(memory_format=layout)
    dy = draw(16, channels, 9, 7).to(device, dtype).contiguous(memory_format=layout)
    module = SyncBatchNorm(channels, _EPS, _MOMENTUM).to(device)
    if dtype == torch.float64:
        module.double()
    with torch.no_grad():
        module.weight.copy_(1 + draw(channels) / 4)
        module.bias.copy_(draw(channels))
    inputs = [x.requires_grad_(), module.weight, module.bias]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    mean = wide[0].mean((0, 2, 3), keepdim=True)
    variance = (wide[0] - mean).square().mean((0, 2, 3), keepdim=True)
    normalized = (wide[0] - mean) / (variance + _EPS).sqrt()
    wanted = normalized * wide[1].view(1, -1, 1, 1) + wide[2].view(1, -1, 1, 1)
    unbiased = variance.flatten() * x.numel() / (x.numel() - channels)
    running = [_MOMENTUM * mean.flatten(), 1 - _MOMENTUM + _MOMENTUM * unbiased]
    y = module(x)
    found = [y, *torch.autograd.grad(y, inputs, dy), module.running_mean, module.running_var]
    exact = [wanted, *torch.autograd.grad(wanted, wide, dy.double()), *running]
    for got, want in zip(found, exact, strict=True):
        yield ((got.double() - want).abs().max() / want.abs().max()).item()


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, world_size=2, rank=rank)
    for backend in ("gloo", "apex"):
        group = dist.new_group(backend=backend, timeout=timeout)
        medians = []
        for size in (_SMALL, _LARGE):
            tensor = torch.zeros(size // 4, device="cpu")
            times = [_seconds(tensor, group) for _ in range(10 if size == _LARGE else 300)]
            medians.append(statistics.median(times))
        own: Any = group._get_backend(torch.device("cpu"))
        shares = backend == "apex" and own.supports_tensor_alloc(torch.device("cpu"))
        if rank == 0:
            with Path(folder, "results").open("a") as file:
                print(json.dumps([backend, medians[0], _LARGE / medians[1], shares]), file=file)
    dist.destroy_process_group()


def _seconds(tensor: Tensor, group: Any) -> float:
    begin = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    return time.perf_counter() - begin


def measure(host: Host) -> None:
    """Run two processes for at most a minute and write their measurements to `host`."""
    with tempfile.TemporaryDirectory(prefix="apex_doctor_") as folder:
        processes = mp.spawn(_rank, (folder,), nprocs=2, join=False)
        until = time.monotonic() + _TIMEOUT_S
        try:
            while not processes.join(timeout=max(0.0, until - time.monotonic())):
                if time.monotonic() >= until:
                    raise TimeoutError(f"no end within {_TIMEOUT_S:g} s")
        except (mp.ProcessRaisedException, mp.ProcessExitedException, TimeoutError) as error:
            host.problem = f"two processes here: {str(error).strip().splitlines()[-1]}"
        finally:
            for process in processes.processes:
                process.kill()
        results = Path(folder, "results")
        for line in results.read_text().splitlines() if results.is_file() else ():
            backend, latency, speed, shares = json.loads(line)
            host.all_reduce[backend] = (latency, speed)
            host.shares_memory = shares


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report and return the exit code."""
    argparse.ArgumentParser("apex-doctor", description=__doc__).parse_args(arguments)
    host = look()
    for name in ("cpu", "cuda:0") if host.gpus else ("cpu",):
        host.batch_norm.update(check_batch_norm(torch.device(name)))
    measure(host)
    print("\n".join(describe(host)), flush=True)
    return int(bool(host.wrong or host.problem))


if __name__ == "__main__":
    sys.exit(main())
