# SPDX-License-Identifier: BSD-3-Clause
"""Facts that a rank can gather about its installation and host without communication."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from apex import _build_info
from apex._doctor import network
from apex._internal.host import boot_of_host

#: Variables that affect results or speed and should be equal on all ranks. Names of network
#: interfaces (GLOO_SOCKET_IFNAME), GPUs (CUDA_VISIBLE_DEVICES) and cores may differ by host or
#: rank.
_SHARED_VARIABLES = re.compile(
    r"(APEX|ATEN|CUBLAS|CUDNN|GLOO|GOMP|KMP|MKL|NCCL|NVIDIA|OMP|PYTORCH|TORCH)_\w+|LD_PRELOAD"
)
_OWN_VARIABLES = re.compile(
    r"\w+_SOCKET_IFNAME|NCCL_(HOSTID|IB_HCA)|NVIDIA_VISIBLE_DEVICES|OMP_PLACES|GOMP_CPU_AFFINITY"
)
#: Names and values, such as https://user:password@host, that may hold a secret. They are neither
#: compared nor printed. NCCL_IB_PKEY is a partition number, not a key.
_SECRET_NAME = re.compile(r"AUTH|CRED|(?<!IB_P)KEY|LICENSE|PASS|PWD|SECRET|TOKEN", re.I)
_SECRET_VALUE = re.compile(r"://[^/]*@")


@dataclass(frozen=True)
class Build:
    """Versions and build options of this installation.

    Attributes:
        built_for: the torch version that apex was built for.
        torch_cuda: the CUDA version that torch was built for; None for a CPU build.
        cuda_reason, nccl_reason: why these parts were built or left out.
    """

    apex: str
    torch: str
    python: str
    built_for: str
    compiler: str
    cxx11_abi: bool
    torch_cuda: str | None
    with_cuda: bool
    cuda_reason: str
    with_nccl: bool
    nccl_reason: str


@dataclass(frozen=True)
class Gpus:
    """GPUs that the system has, and GPUs that torch can use.

    Attributes:
        device_files: the number of files /dev/nvidia<number>.
        names: of the GPUs that torch sees.
        own: the index of this rank's GPU, chosen by its local rank; None if there is no GPU.
        uuid: of this rank's GPU.
    """

    device_files: int
    names: tuple[str, ...]
    own: int | None = None
    uuid: str = ""


@dataclass(frozen=True)
class Processors:
    """The cores of this process.

    Attributes:
        online: the number of cores of the host.
        affinity: the numbers of the cores that this process may run on.
        quota: the CPU limit of its cgroup, in cores; None if unlimited.
        threads: the number of threads of torch's CPU operators in this process.
        capability: the instruction set of these operators.
        governor: the frequency governor; None where the system does not report it, or where the
            processor chooses its frequency itself.
        load: the load average of the last minute.
    """

    online: int
    affinity: tuple[int, ...]
    quota: float | None
    threads: int
    capability: str
    governor: str | None
    load: float


@dataclass(frozen=True)
class Memory:
    """Memory sizes, in bytes.

    Attributes:
        limit: of the cgroup; None if it is not below the memory of the host.
        available: without swapping, within the limit.
        shm: the size of /dev/shm; None if it does not exist.
    """

    total: int
    available: int
    limit: int | None
    swap_used: int
    shm: int | None


@dataclass(frozen=True)
class Limits:
    """The limits that ``ulimit`` shows; None means unlimited.

    Attributes:
        open_files, most_open_files: the soft and the hard limit.
        file_bytes: the largest file size. Shared memory counts as a file.
    """

    open_files: int | None
    most_open_files: int | None
    file_bytes: int | None


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: the host name.
        boot: identifies the running kernel, also from inside a container.
        processes: the PID namespace. Ranks can share memory only within one.
        addresses: the network namespace.
    """

    rank: int
    host: str
    boot: str
    processes: str
    addresses: str

    @property
    def key(self) -> tuple[str, str]:
        """Equal for ranks that the engine treats as ranks of one host."""
        return self.boot, self.processes


@dataclass(frozen=True)
class Facts:
    """All facts about one rank."""

    place: Place
    build: Build
    gpus: Gpus
    processors: Processors
    memory: Memory
    limits: Limits
    cards: tuple[network.Card, ...]
    gloo: network.GlooChoice
    variables: Mapping[str, str]
    is_torchrun: bool


def gather(environment: Mapping[str, str]) -> Facts:
    """The facts about this process. Only the lookup of host names may block."""
    cards = network.read_cards()
    host = socket.gethostname()
    variable = environment.get("GLOO_SOCKET_IFNAME", "")
    return Facts(
        place=_place(host, environment),
        build=_build(),
        gpus=_gpus(int(environment.get("LOCAL_RANK", "0"))),
        processors=_processors(),
        memory=_memory(),
        limits=_limits(),
        cards=cards,
        gloo=network.choose(cards, variable, network.usable_addresses(host)),
        variables=shared_variables(environment),
        is_torchrun="TORCHELASTIC_RUN_ID" in environment,
    )


def shared_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that should be equal on all ranks."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if _SHARED_VARIABLES.fullmatch(name)
        and not _OWN_VARIABLES.fullmatch(name)
        and not _SECRET_NAME.search(name)
        and not _SECRET_VALUE.search(value)
    }


def _place(host: str, environment: Mapping[str, str]) -> Place:
    def namespace(kind: str) -> str:
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/ns/{kind}")
        return ""

    return Place(
        rank=int(environment.get("RANK", "0")),
        host=host,
        boot=boot_of_host(),
        processes=namespace("pid"),
        addresses=namespace("net"),
    )


def _build() -> Build:
    return Build(
        apex=_build_info.version,
        torch=str(torch.__version__),
        python=platform.python_version(),
        built_for=_build_info.torch_version,
        compiler=_build_info.compiler,
        cxx11_abi=_build_info.cxx11_abi,
        torch_cuda=torch.version.cuda,
        with_cuda=_build_info.with_cuda,
        cuda_reason=_build_info.cuda_reason,
        with_nccl=_build_info.with_nccl,
        nccl_reason=_build_info.nccl_reason,
    )


def _gpus(local_rank: int) -> Gpus:
    files = [file for file in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return Gpus(len(files), ())
    names = tuple(torch.cuda.get_device_name(index) for index in range(count))
    own = local_rank % count  # a rank may see only its own GPU
    return Gpus(len(files), names, own, str(torch.cuda.get_device_properties(own).uuid))


def _processors() -> Processors:
    governor = _text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"))
    driver = _text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver")) or ""
    return Processors(
        online=os.cpu_count() or 1,
        affinity=tuple(sorted(os.sched_getaffinity(0))),
        quota=cpu_quota(),
        threads=torch.get_num_threads(),
        capability=torch.backends.cpu.get_cpu_capability(),
        # With these drivers "powersave" is a hint, not a fixed frequency.
        governor=None if driver in ("intel_pstate", "amd-pstate-epp") else governor,
        load=os.getloadavg()[0],
    )


def _limits() -> Limits:
    def known(value: int) -> int | None:
        return None if value == resource.RLIM_INFINITY else value

    soft, hard = map(known, resource.getrlimit(resource.RLIMIT_NOFILE))
    return Limits(soft, hard, known(resource.getrlimit(resource.RLIMIT_FSIZE)[0]))


def _memory() -> Memory:
    lines = (_text(Path("/proc/meminfo")) or "").splitlines()
    fields = [re.match(r"(\w+): +(\d+) kB", line) for line in lines]
    kib = {found[1]: int(found[2]) for found in fields if found}
    total, available = (kib.get(name, 0) << 10 for name in ("MemTotal", "MemAvailable"))
    limit, within = memory_limit()
    shm = None
    with contextlib.suppress(OSError):
        status = os.statvfs("/dev/shm")
        shm = status.f_frsize * status.f_blocks
    return Memory(
        total=total,
        available=available if within is None else min(available, within),
        limit=limit if limit is not None and limit < total else None,
        swap_used=(kib.get("SwapTotal", 0) - kib.get("SwapFree", 0)) << 10,
        shm=shm,
    )


# --- cgroups, versions 1 and 2 ---


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The smallest CPU limit of this process's cgroups, in cores; None if unlimited.

    Args:
        root: the folder that contains ``proc`` and ``sys``.
    """
    quotas = []
    for folder in _groups(root, "cpu"):
        both = (_text(folder / "cpu.max") or "").split()  # version 2: "max 100000"
        if not both:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            both = [_text(folder / name) or "" for name in names]
        if len(both) == 2 and all(part.isdecimal() for part in both) and int(both[1]) > 0:
            quotas.append(int(both[0]) / int(both[1]))
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """The smallest memory limit of this process's cgroups, and the smallest remainder, in bytes.

    Version 1 reports "unlimited" as a limit that is larger than any memory.
    """
    limits, left = [], []
    for folder in _groups(root, "memory"):
        for most, used, files in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _text(folder / most) or "", _text(folder / used) or ""
            if not limit.isdecimal():  # "max"
                continue
            limits.append(int(limit))
            if usage.isdecimal():
                # The kernel evicts cached files before it runs out of memory.
                statistics = _text(folder / "memory.stat") or ""
                cached = re.search(rf"^{files} (\d+)$", statistics, re.M)
                left.append(int(limit) - int(usage) + (int(cached[1]) if cached else 0))
    return min(limits, default=None), min(left, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and its ancestors, as far as they are visible."""
    mounted = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 1 mounts each controller, or the controllers of one line together, in a folder.
        for folder in {mounted / controller, mounted / controllers} if controllers else {mounted}:
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(parts), -1, -1):
                group = folder.joinpath(*parts[:depth])
                if group.is_dir():
                    yield group


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return None
