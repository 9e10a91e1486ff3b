# SPDX-License-Identifier: BSD-3-Clause
"""docs/kernels.md covers the current kernels and all architectures, within limits.

scripts/kernel_resources.py writes the page, for which it compiles the kernels for every
architecture. Here they are compiled for one, which takes two minutes, where the page is of other
sources or APEX_TEST_KERNELS is set.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import kernel_resources  # noqa: E402
from kernel_resources import Kernel, Resources, Table  # noqa: E402
from package_support import require_nvcc  # noqa: E402

PAGE = ROOT / "docs" / "kernels.md"
AGAIN = "run `python scripts/kernel_resources.py --output docs/kernels.md`, and look at the changes"
VECTORS = {"float": (1, 2, 4), "double": (1, 2), "half": (1, 4, 8), "bfloat16": (1, 4, 8)}
SHARED_BYTES = 48 << 10  # per block, on all architectures and without an opt-in
#: The minimum number of blocks that a multiprocessor has registers for.
BLOCKS = {"rows_statistics_kernel": 1, "rows_reduce_kernel": 1}
#: The maximum in bytes per thread; 0 for other kernels. Lower them when the page allows.
SPILLS = {
    "planes_normalize_kernel": 16,
    "planes_statistics_kernel": 24,
    "rows_gradient_kernel": 48,
    "rows_normalize_kernel": 32,
    "rows_reduce_kernel": 84,
    "rows_statistics_kernel": 48,
}


def over_the_limit(table: Table) -> list[str]:
    """The values beyond the limits, in words."""
    threads = kernel_resources.threads_per_block()
    found = []
    for kernel, row in table.items():
        for architecture, used in row.items():
            # allocated in units of eight
            registers = -(-used.registers // 8) * 8 * threads[kernel.name]
            blocks = kernel_resources.REGISTERS // registers
            where = f"{kernel} on sm_{architecture}"
            if blocks < BLOCKS.get(kernel.name, 2):
                found.append(f"{where}: {used.registers} registers leave room for {blocks} blocks")
            if used.spill_bytes > SPILLS.get(kernel.name, 0):
                found.append(f"{where}: {used.spill_bytes} bytes are spilled")
            if used.shared_bytes > SHARED_BYTES:
                found.append(f"{where}: {used.shared_bytes} bytes of shared memory")
    return found


@pytest.fixture(scope="module")
def page() -> tuple[str, str, Table]:
    return kernel_resources.read_page(PAGE.read_text())


def test_page_is_of_the_present_sources(page: tuple[str, str, Table]) -> None:
    assert page[1] == kernel_resources.digest(), f"a kernel has changed: {AGAIN}"


def test_page_has_every_kernel_on_every_architecture(page: tuple[str, str, Table]) -> None:
    names = kernel_resources.threads_per_block()
    assert len(names) == 8
    instances = {
        Kernel(name, element, vector)
        for name, (element, vectors) in product(names, VECTORS.items())
        for vector in vectors
    }
    assert set(page[2]) == instances
    architectures = kernel_resources.shipped_architectures()
    assert 90 in architectures
    assert {tuple(row) for row in page[2].values()} == {tuple(architectures)}


def test_page_is_within_the_limits(page: tuple[str, str, Table]) -> None:
    assert over_the_limit(page[2]) == []


def test_limits_catch_registers_spills_and_shared_memory() -> None:
    kernel, large = (
        Kernel("planes_gradient_kernel", "float", 4),
        Kernel("rows_reduce_kernel", "half", 8),
    )
    assert over_the_limit({kernel: {90: Resources(128, 0, 0)}}) == []
    assert len(over_the_limit({kernel: {90: Resources(129, 0, 0)}})) == 1
    assert len(over_the_limit({kernel: {90: Resources(64, 1, 0)}})) == 1
    assert len(over_the_limit({kernel: {90: Resources(64, 0, SHARED_BYTES + 1)}})) == 1
    assert over_the_limit({large: {90: Resources(128, 0, 0)}}) == []
    assert len(over_the_limit({large: {90: Resources(136, 0, 0)}})) == 1


def test_parse_reads_what_the_compiler_prints() -> None:
    symbol = "_ZN4apex7kernels20planes_reduce_kernelIN3c104HalfELi8ELNS0_8ReluMaskE{}EEEvNS0_1PE"
    text = "".join(
        f"ptxas info    : Compiling entry function '{symbol.format(mask)}' for 'sm_90'\n"
        f"ptxas info    : Function properties for {symbol.format(mask)}\n"
        f"    8 bytes stack frame, {12 - mask} bytes spill stores, 4 bytes spill loads\n"
        f"ptxas info    : Used {39 + mask} registers, used 1 barriers, 536 bytes smem\n"
        for mask in (0, 1)
    )
    kernel = Kernel("planes_reduce_kernel", "half", 8)
    assert kernel_resources.parse(text) == {kernel: {90: Resources(40, 16, 536)}}


@dataclass(frozen=True)
class Compiled:
    """The kernels for sm_90."""

    nvcc_version: str
    table: Table
    ptx: str


@pytest.fixture(scope="module")
def compiled(page: tuple[str, str, Table], tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Compiled once, because it takes long."""
    if page[1] == kernel_resources.digest() and not os.environ.get("APEX_TEST_KERNELS"):
        pytest.skip("docs/kernels.md is of these sources; APEX_TEST_KERNELS=1 compiles them again")
    folder, include = tmp_path_factory.mktemp("compiled"), kernel_resources.torch_include()
    torch = ("-isystem", include, "-include=c10/util/BFloat16.h")
    nvcc = require_nvcc(folder, "-std=c++20", "-arch=sm_90", "--expt-relaxed-constexpr", *torch)
    table = kernel_resources.parse(kernel_resources.compile_for(nvcc, include, 90, keep=folder))
    ptx = (folder / "batch_norm.ptx").read_text()
    return Compiled(kernel_resources.nvcc_version(nvcc), table, ptx)


@pytest.mark.slow
def test_kernels_compile_as_the_page_says(page: tuple[str, str, Table], compiled: Compiled) -> None:
    assert set(compiled.table) == set(page[2])
    # Another nvcc allocates registers differently, and may spill more.
    if compiled.nvcc_version == page[0]:
        assert over_the_limit(compiled.table) == []
        # A row of the page has the largest shared memory of all architectures.
        taken = {k: (row[90].registers, row[90].spill_bytes) for k, row in compiled.table.items()}
        noted = {k: (row[90].registers, row[90].spill_bytes) for k, row in page[2].items()}
        assert taken == noted, AGAIN


@pytest.mark.slow
def test_normalizing_divides_once_in_float64(compiled: Compiled) -> None:
    bodies = re.findall(r"\.entry \S+_normalize_kernel\S+\((.*?)\n}\n", compiled.ptx, re.DOTALL)
    assert len(bodies) == 44
    # For the unbiased variance, which one block per channel computes.
    assert {body.count("div.rn.f64") for body in bodies} == {1}


def test_architectures_follow_the_compiler(tmp_path: Path) -> None:
    cmake = shutil.which("cmake") or pytest.skip("there is no cmake")
    listed = ROOT / "cmake" / "apex_cuda_architectures.cmake"
    script = tmp_path / "architectures.cmake"

    def of(version: str) -> str:
        script.write_text(
            f'include("{listed}")\n'
            f"apex_default_cuda_architectures({version} found)\n"
            'message("${found}")\n'
        )
        done = subprocess.run([cmake, "-P", script], capture_output=True, text=True, check=True)
        return done.stderr.strip()

    since_turing = ";".join(f"{each}-real" for each in kernel_resources.shipped_architectures())
    assert of("13.0.88") == since_turing.removesuffix("-real")
    assert of("12.8.93") == f"70-real;{of('13.0.88')}"
    assert of("12.4.131") == "70-real;75-real;80-real;86-real;89-real;90"
