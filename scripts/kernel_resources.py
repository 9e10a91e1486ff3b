# SPDX-License-Identifier: BSD-3-Clause
"""Compile the CUDA kernels for every shipped architecture, and tabulate the resources that they
use.

    python scripts/kernel_resources.py                      print the page
    python scripts/kernel_resources.py --output docs/kernels.md
    python scripts/kernel_resources.py --architectures 90   some only

Needs nvcc (CUDACXX, or on PATH) and torch, whose headers are included. A CPU build of torch is
sufficient, and no GPU is needed. It takes about 30 seconds of CPU time per architecture.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "cpp" / "src" / "kernels"
SOURCES = ("batch_norm.cu",)
TYPES = {"f": "float", "d": "double", "N3c104HalfE": "half", "N3c108BFloat16E": "bfloat16"}
REGISTERS = 65536  # per multiprocessor, on all of these architectures


@dataclass(frozen=True)
class Kernel:
    name: str
    element: str
    vector: int  # elements per load


@dataclass(frozen=True)
class Resources:
    registers: int  # per thread
    spill_bytes: int  # stores and loads, per thread
    shared_bytes: int  # per block


Table = dict[Kernel, dict[int, Resources]]


def shipped_architectures() -> list[int]:
    """The architectures of cmake/apex_cuda_architectures.cmake for the newest compiler."""
    text = (ROOT / "cmake" / "apex_cuda_architectures.cmake").read_text()
    lists = re.findall(r"set\(apex_cuda_architectures ((?:\d+(?:-real)? ?)+)\)", text)
    return sorted({int(number) for found in lists for number in re.findall(r"\d+", found)})


def threads_per_block() -> dict[str, int]:
    """By kernel, the threads per block that __launch_bounds__ promises to the compiler."""
    index = (KERNELS / "batch_norm_index.h").read_text()
    sizes = {n: int(v) for n, v in re.findall(r"constexpr int (k\w*Threads) = (\d+);", index)}
    text = "".join(path.read_text() for path in sorted(KERNELS.glob("*.cuh")))
    bounds = re.findall(r"__launch_bounds__\((\w+)(?:, \d)?\)\s+(\w+_kernel)\(", text)
    return {kernel: sizes[constant] for constant, kernel in bounds}


def digest() -> str:
    """A digest of the kernels' code. It ignores comments and layout."""
    result = hashlib.sha256()
    for path in sorted(KERNELS.iterdir()):
        of_cpu = path.name.startswith(("batch_norm_cpu_", "processor_cache"))
        if path.suffix not in (".cu", ".cuh", ".h") or of_cpu:
            continue
        code = re.sub(r"//[^\n]*", "", path.read_text())
        result.update(path.name.encode() + "".join(code.split()).encode())
    return result.hexdigest()[:16]


def find_nvcc() -> str | None:
    return os.environ.get("CUDACXX") or shutil.which("nvcc")


def nvcc_version(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V([\d.]+)", text)
    return found[1] if found else "of unknown version"


def parse(output: str) -> Table:
    """The table of the output of `ptxas -v`. For variants by mask or z, the maximum of each
    value."""
    table: Table = {}
    pattern = re.compile(
        r"Compiling entry function '(?P<symbol>\w+)' for 'sm_(?P<arch>\d+)'"
        r".*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
        r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
        re.DOTALL,
    )
    for found in pattern.finditer(output):
        symbol = re.match(
            r"_ZN4apex7kernels\d+(\w+_kernel)I(.+?)Li(\d+)E(?:Lb[01]E|LNS0_8ReluMaskE\dE)?EE",
            found["symbol"],
        )
        if symbol is None:
            raise ValueError(f"a kernel of an unknown kind: {found['symbol']}")
        shared = re.search(r"(\d+) bytes smem", found["rest"])
        row = table.setdefault(Kernel(symbol[1], TYPES[symbol[2]], int(symbol[3])), {})
        architecture = int(found["arch"])
        most = row.get(architecture, Resources(0, 0, 0))
        row[architecture] = Resources(
            max(most.registers, int(found["registers"])),
            max(most.spill_bytes, int(found["stores"]) + int(found["loads"])),
            max(most.shared_bytes, int(shared[1]) if shared else 0),
        )
    return table


def compile_for(nvcc: str, include: str, architecture: int, keep: Path | None = None) -> str:
    """The output of ptxas. Raises RuntimeError with the output of a failed compilation.

    Args:
        keep: a folder where nvcc leaves its intermediate files, such as batch_norm.ptx.
    """
    output = ""
    kept = [] if keep is None else ["--keep", f"--keep-dir={keep}"]
    for source in SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                *(nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v", "-cubin"),
                *(f"-arch=sm_{architecture}", "-isystem", include, f"-I{ROOT / 'cpp' / 'src'}"),
                *(*kept, "-o", f"{folder}/kernels.cubin", str(KERNELS / source)),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"sm_{architecture}: {done.stdout}{done.stderr}")
            output += done.stdout + done.stderr
    return output


def torch_include() -> str:
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("there is no torch, whose headers the kernels include")
    return str(Path(spec.origin).parent / "include")


def measure(nvcc: str, architectures: Iterable[int], jobs: int) -> Table:
    include = torch_include()
    table: Table = {}
    with ThreadPoolExecutor(jobs) as pool:
        for output in pool.map(lambda each: compile_for(nvcc, include, each), architectures):
            for kernel, row in parse(output).items():
                table.setdefault(kernel, {}).update(row)
    return table


def page(table: Table, version: str) -> str:
    threads = threads_per_block()
    architectures = sorted({each for row in table.values() for each in row})
    names = [f"sm_{each}" for each in architectures]
    lines = [
        "# CUDA kernels: registers and shared memory",
        "",
        "What each kernel takes on each shipped architecture, as the compiler says: registers per",
        "thread (and, after a plus, bytes of them that are spilled to memory); shared memory per",
        "block in bytes. `python scripts/kernel_resources.py --output docs/kernels.md` writes this",
        "page; `python/tests/test_kernel_resources.py` fails when a kernel has changed since.",
        "Of a kernel's variants (by the ReLU's mask, with and without z) the page has the maximum.",
        "",
        f"Compiler: nvcc {version}. Sources: {digest()}.",
        "",
        "| kernel | type | elements per load | threads | shared | " + " | ".join(names) + " |",
        "|---" * (5 + len(names)) + "|",
    ]
    for kernel in sorted(
        table, key=lambda k: (k.name, list(TYPES.values()).index(k.element), k.vector)
    ):
        row = table[kernel]
        cells = [
            f"{used.registers}" + (f" + {used.spill_bytes}" if used.spill_bytes else "")
            for used in (row[each] for each in architectures)
        ]
        shared = max(used.shared_bytes for used in row.values())
        lines.append(
            f"| `{kernel.name}` | {kernel.element} | {kernel.vector} | {threads[kernel.name]} | "
            f"{shared} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines) + "\n"


def read_page(text: str) -> tuple[str, str, Table]:
    """Read a page: the version of the compiler, the digest of the sources, and the table."""
    head = re.search(r"Compiler: nvcc ([\d.]+)\. Sources: (\w+)\.", text)
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]
    if head is None or not rows:
        raise ValueError("this is no page of kernel_resources.py")
    architectures = [int(name.removeprefix("sm_")) for name in rows[0][5:]]
    table: Table = {}
    for name, element, vector, _, shared, *cells in rows[1:]:
        row = table[Kernel(name, element, int(vector))] = {}
        for architecture, cell in zip(architectures, cells, strict=True):
            registers, _, spill = cell.partition(" + ")
            row[architecture] = Resources(int(registers), int(spill or 0), int(shared))
    return head[1], head[2], table


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--architectures", type=int, nargs="+", default=shipped_architectures())
    parser.add_argument("--output", type=Path, help="write the page there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    options = parser.parse_args(arguments)
    nvcc = find_nvcc()
    if nvcc is None:
        print("there is no nvcc: put it on PATH, or set CUDACXX", file=sys.stderr)
        return 1
    text = page(measure(nvcc, options.architectures, options.jobs), nvcc_version(nvcc))
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
