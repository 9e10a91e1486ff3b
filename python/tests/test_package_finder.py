# SPDX-License-Identifier: BSD-3-Clause
"""cmake/FindLibtorch.cmake and what configuring says, with torch packages of every kind.

Most of these packages are folders of empty files, because configuring reads only names and
versions, and compiles nothing of torch.
"""

from pathlib import Path

import pytest
from package_support import CMAKE, ROOT, cmake, make_torch, words

pytestmark = pytest.mark.skipif(CMAKE is None, reason="there is no cmake on PATH")

FINDER = f"""
cmake_minimum_required(VERSION 3.22)
project(finder NONE)
set(CMAKE_SHARED_LIBRARY_SUFFIX .so)
list(APPEND CMAKE_MODULE_PATH "{ROOT}/cmake")
find_package(Libtorch)
foreach(name IN ITEMS FOUND PREFIX VERSION FULL_VERSION CUDA CUDA_VERSION CXX11_ABI CXX_STANDARD)
  message(STATUS "${{name}}=${{Libtorch_${{name}}}}")
endforeach()
"""


def find(tmp_path: Path, *options: str, **environment: str) -> dict[str, str]:
    """The results of FindLibtorch."""
    (tmp_path / "CMakeLists.txt").write_text(FINDER)
    build = str(tmp_path / "build")
    status, output = cmake("-S", str(tmp_path), "-B", build, *options, **environment)
    assert status == 0, output
    return dict(line[3:].split("=", 1) for line in output.splitlines() if "=" in line)


def configure(tmp_path: Path, *options: str, **environment: str) -> tuple[int, str]:
    """Configure this project, without tests."""
    off = [f"-DAPEX_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES")]
    return cmake("-S", str(ROOT), "-B", str(tmp_path / "build"), *off, *options, **environment)


@pytest.mark.parametrize(
    ("version", "cuda", "archive", "expected"),
    [
        ("2.13.0+cpu", None, False, ("OFF", "", "17")),
        ("2.15.0+cu132", "13.2", False, ("ON", "13.2", "20")),
        ("2.12.1+cu126", "", True, ("ON", "12.6", "17")),
    ],
)
def test_finder_describes_a_package_without_compiling(
    version: str, cuda: str | None, archive: bool, expected: tuple[str, ...], tmp_path: Path
) -> None:
    package = make_torch(tmp_path / "torch", version, cuda, archive)
    found = find(tmp_path, f"-DLibtorch_ROOT={package}", CUDACXX="/nowhere/nvcc")
    assert found["FULL_VERSION"] == version
    assert (found["CUDA"], found["CUDA_VERSION"], found["CXX_STANDARD"]) == expected


@pytest.mark.parametrize("variable", ["Torch_ROOT", "Torch_DIR", "CMAKE_PREFIX_PATH"])
def test_finder_variables_of_torch_understood(tmp_path: Path, variable: str) -> None:
    package = make_torch(tmp_path / "torch", "2.13.0+cpu")
    folder = package / "share" / "cmake"
    value = {"Torch_DIR": folder / "Torch", "CMAKE_PREFIX_PATH": folder}.get(variable, package)
    assert Path(find(tmp_path, f"-D{variable}={value}")["PREFIX"]) == package


def test_configure_wrong_torch_ends_in_one_sentence(tmp_path: Path) -> None:
    old = make_torch(tmp_path / "torch", "2.10.0+cpu")
    for option, sentence in (
        ("-DPython_EXECUTABLE=/bin/false", "install it into the Python that runs this build (pip"),
        (f"-DLibtorch_ROOT={tmp_path}/nowhere", "nowhere, holds none: install it"),
        (f"-DLibtorch_ROOT={old}", "apex needs PyTorch 2.11 or newer"),
    ):
        status, output = configure(tmp_path, option)
        assert status != 0
        assert sentence in words(output)
        assert output.count("CMake Error") == 1 and "Call Stack" not in output


def test_configure_says_what_is_built_and_why_not(tmp_path: Path) -> None:
    package = make_torch(tmp_path / "torch", "2.13.0+cpu")
    status, output = configure(tmp_path, f"-DLibtorch_ROOT={package}")
    assert status == 0, output
    assert "CUDA parts    OFF  (this libtorch is a CPU build)" in output
    assert "NCCL backend  OFF  (the CUDA parts are off)" in output
    assert f"libtorch      2.13.0+cpu in {package}" in output


def test_configure_cuda_torch_without_nvcc_builds_cpu_parts_and_says_so(tmp_path: Path) -> None:
    package = make_torch(tmp_path / "torch", "2.13.0+cu130", cuda="13.0")
    options = (f"-DLibtorch_ROOT={package}",)
    status, output = configure(tmp_path, *options, CUDACXX="/nowhere/nvcc")
    assert status == 0, output
    assert "CUDA parts    OFF  (no working nvcc was found" in output
    status, output = configure(tmp_path, *options, "-DAPEX_CUDA=ON", CUDACXX="/nowhere/nvcc")
    assert status != 0
    assert "asks for the CUDA parts, but no working nvcc was found" in words(output)
