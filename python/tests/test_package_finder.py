# SPDX-License-Identifier: BSD-3-Clause
"""cmake/FindLibtorch.cmake and the configure summary, with torch packages of every kind.

Most of these packages are folders of empty files, because configuring reads only names and
versions, and compiles nothing of torch.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from package_support import CMAKE, ROOT, cmake, generator, make_torch, require_nvcc, words

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
foreach(name IN ITEMS libtorch libtorch_cuda python)
  if(TARGET Libtorch::${{name}})
    message(STATUS "target=${{name}}")
  endif()
endforeach()
"""


def find(tmp_path: Path, *options: str, **environment: str) -> dict[str, str]:
    """The results of FindLibtorch. "targets" lists the imported targets."""
    (tmp_path / "CMakeLists.txt").write_text(FINDER)
    build = str(tmp_path / "build")
    status, output = cmake("-S", str(tmp_path), "-B", build, *options, **environment)
    assert status == 0, output
    said = [line[3:].split("=", 1) for line in output.splitlines() if "=" in line]
    found = {name: value for name, value in said if name != "target"}
    return found | {"targets": " ".join(value for name, value in said if name == "target")}


def configure(tmp_path: Path, *options: str, **environment: str) -> tuple[int, str]:
    """Configure this project, without tests."""
    off = [f"-DAPEX_{part}=OFF" for part in ("BUILD_TESTS", "BUILD_EXAMPLES", "UNITY_BUILD")]
    return cmake("-S", str(ROOT), "-B", str(tmp_path / "build"), *off, *options, **environment)


def test_finder_torch_of_this_environment_described_right(tmp_path: Path) -> None:
    found = find(tmp_path, f"-DPython_EXECUTABLE={sys.executable}")
    assert Path(found["PREFIX"]) == Path(torch.__file__).parent
    assert found["FULL_VERSION"] == str(torch.__version__)
    assert found["VERSION"] == str(torch.__version__).split("+")[0]
    assert found["CXX11_ABI"] == str(int(torch.compiled_with_cxx11_abi()))
    assert (found["CUDA"], found["CUDA_VERSION"]) == (
        ("ON", torch.version.cuda) if torch.version.cuda else ("OFF", "")
    )
    assert "libtorch" in found["targets"].split() and "python" in found["targets"].split()


def test_finder_cpu_wheel_no_cuda_target(tmp_path: Path) -> None:
    package = make_torch(tmp_path / "torch", "2.13.0+cpu")
    found = find(tmp_path, f"-DLibtorch_ROOT={package}")
    assert (found["CUDA"], found["CUDA_VERSION"], found["CXX_STANDARD"]) == ("OFF", "", "17")
    assert found["targets"] == "libtorch python"


def test_finder_cuda_wheel_described_from_the_package_alone(tmp_path: Path) -> None:
    package = make_torch(tmp_path / "torch", "2.15.0+cu132", cuda="13.2")
    found = find(tmp_path, f"-DLibtorch_ROOT={package}", CUDACXX="/nowhere/nvcc")
    assert (found["CUDA"], found["CUDA_VERSION"], found["CXX_STANDARD"]) == ("ON", "13.2", "20")
    assert found["targets"] == "libtorch libtorch_cuda python"


@pytest.mark.parametrize("abi", [0, 1])
def test_finder_unpacked_archive_described_without_version_py(tmp_path: Path, abi: int) -> None:
    package = make_torch(tmp_path / "libtorch", "2.12.1+cu126", cuda="", archive=True, abi=abi)
    found = find(tmp_path, f"-DLibtorch_ROOT={package}")
    assert (found["VERSION"], found["FULL_VERSION"]) == ("2.12.1", "2.12.1+cu126")
    assert (found["CUDA_VERSION"], found["CXX11_ABI"]) == ("12.6", str(abi))
    assert found["targets"] == "libtorch libtorch_cuda"


@pytest.mark.parametrize("variable", ["Torch_ROOT", "TORCH_INSTALL_PREFIX", "Torch_DIR"])
def test_finder_variables_of_torch_understood(tmp_path: Path, variable: str) -> None:
    package = make_torch(tmp_path / "torch", "2.13.0+cpu")
    value = package / "share" / "cmake" / "Torch" if variable == "Torch_DIR" else package
    assert Path(find(tmp_path, f"-D{variable}={value}")["PREFIX"]) == package


def test_finder_torchs_cmake_prefix_path_understood(tmp_path: Path) -> None:
    package = make_torch(tmp_path / "torch", "2.13.0+cpu")
    found = find(tmp_path, f"-DCMAKE_PREFIX_PATH=/usr;{package / 'share' / 'cmake'}")
    assert Path(found["PREFIX"]) == package


@pytest.mark.parametrize("variable", ["CMAKE_PREFIX_PATH", "Torch_DIR"])
def test_finder_environment_variables_of_find_package_understood(
    tmp_path: Path, variable: str
) -> None:
    package = make_torch(tmp_path / "torch", "2.13.0+cpu")
    folder = package / "share" / "cmake"
    value = {"CMAKE_PREFIX_PATH": f"/usr:{folder}", "Torch_DIR": f"{folder}/Torch"}[variable]
    assert Path(find(tmp_path, **{variable: value})["PREFIX"]) == package


def test_finder_called_beside_a_folder_torch_asks_for_the_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a clone of PyTorch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    found = find(tmp_path, f"-DPython_EXECUTABLE={sys.executable}")
    assert Path(found["PREFIX"]) == Path(torch.__file__).parent


def test_finder_environment_variable_before_python(tmp_path: Path) -> None:
    package = make_torch(tmp_path / "torch", "2.13.0+cpu")
    python = f"-DPython_EXECUTABLE={sys.executable}"
    assert Path(find(tmp_path, python, Libtorch_ROOT=str(package))["PREFIX"]) == package


def test_configure_no_torch_one_sentence(tmp_path: Path) -> None:
    status, output = configure(tmp_path, "-DPython_EXECUTABLE=/bin/false")
    assert status != 0
    assert "install it into the Python that runs this build (pip install torch" in words(output)
    assert output.count("CMake Error") == 1 and "Call Stack" not in output


def test_configure_again_after_no_torch_asks_the_python_of_then(tmp_path: Path) -> None:
    """In the same build folder, as after `source .venv/bin/activate`."""
    package = make_torch(tmp_path / "packages" / "torch", "2.13.0+cpu")
    (package / "__init__.py").touch()
    for name, text in ("bare", "exit 1"), ("full", f'exec {sys.executable} -S "$@"'):
        python = tmp_path / name / "python3"
        python.parent.mkdir()
        python.write_text(f"#!/bin/sh\n{text}\n")
        python.chmod(0o755)
    path = os.environ["PATH"]
    status, output = configure(tmp_path, PATH=f"{tmp_path / 'bare'}:{path}")
    assert status != 0 and "found none" in output
    paths = {"PATH": f"{tmp_path / 'full'}:{path}", "PYTHONPATH": str(package.parent)}
    status, output = configure(tmp_path, **paths)
    assert status == 0, output
    assert f"libtorch      2.13.0+cpu in {package}" in output


@pytest.mark.parametrize("given", ["option", "environment"])
def test_configure_root_without_libtorch_named_and_no_other_taken(
    tmp_path: Path, given: str
) -> None:
    wrong = str(tmp_path / "nowhere")
    options = [f"-DPython_EXECUTABLE={sys.executable}"]
    options += [f"-DLibtorch_ROOT={wrong}"] if given == "option" else []
    environment = {"Libtorch_ROOT": wrong} if given == "environment" else {}
    status, output = configure(tmp_path, *options, **environment)
    assert status != 0
    assert f"but Libtorch_ROOT, {wrong}, holds none: install it" in words(output)
    assert output.count("CMake Error") == 1 and "Call Stack" not in output


def test_configure_relative_root_below_the_folder_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = make_torch(tmp_path / "torch", "2.13.0+cpu")
    monkeypatch.chdir(tmp_path)
    status, output = configure(tmp_path, "-DLibtorch_ROOT=torch")
    assert status == 0, output
    assert f"libtorch      2.13.0+cpu in {package}" in output


def test_configure_old_torch_one_sentence(tmp_path: Path) -> None:
    package = make_torch(tmp_path / "torch", "2.10.0+cpu")
    status, output = configure(tmp_path, f"-DLibtorch_ROOT={package}")
    assert status != 0
    assert "apex needs PyTorch 2.11 or newer" in words(output)
    assert output.count("CMake Error") == 1 and "Call Stack" not in output


def test_configure_no_googletest_and_no_network_says_what_to_do(tmp_path: Path) -> None:
    package = make_torch(tmp_path / "torch", "2.13.0+cpu")
    status, output = configure(
        tmp_path, f"-DLibtorch_ROOT={package}", "-DAPEX_BUILD_TESTS=ON",
        "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON", "-DFETCHCONTENT_FULLY_DISCONNECTED=ON",
    )  # fmt: skip
    assert status != 0
    assert "GoogleTest is not installed (Debian and Ubuntu: libgtest-dev)" in output
    assert "-DAPEX_BUILD_TESTS=OFF does without" in output and "CMP0135" not in output


def test_configure_absolute_folders_of_an_installation_in_pkg_config(tmp_path: Path) -> None:
    """Nix and Guix pass absolute folders."""
    package = make_torch(tmp_path / "torch", "2.13.0+cpu")
    status, output = configure(
        tmp_path, f"-DLibtorch_ROOT={package}", "-DCMAKE_INSTALL_PREFIX=/opt/apex",
        "-DCMAKE_INSTALL_LIBDIR=/opt/apex/lib64", "-DCMAKE_INSTALL_INCLUDEDIR=include",
    )  # fmt: skip
    assert status == 0, output
    lines = (tmp_path / "build" / "apex.pc").read_text().splitlines()
    assert lines[1:4] == [
        "prefix=/opt/apex", "libdir=/opt/apex/lib64", "includedir=${prefix}/include"
    ]  # fmt: skip


def test_configure_another_torch_in_the_same_folder_changes_every_command(tmp_path: Path) -> None:
    """Its files may be older than the objects, which must be compiled again anyway."""
    commands = []
    for version in "2.12.1+cpu", "2.13.0+cpu":
        package = make_torch(tmp_path / "torch", version)
        status, output = configure(
            tmp_path, f"-DLibtorch_ROOT={package}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
            *generator(),
        )  # fmt: skip
        assert status == 0, output
        text = (tmp_path / "build" / "compile_commands.json").read_text()
        # By the object, which with CMake 3.22 is only in the command.
        compiled = [each["command"] for each in json.loads(text)]
        commands.append({command.split(" -o ")[1].split()[0]: command for command in compiled})
    before, after = commands
    assert before.keys() == after.keys() and len(before) > 50
    assert [name for name in before if before[name] == after[name]] == []


def test_configure_cpu_torch_summary_says_why_cuda_is_off(tmp_path: Path) -> None:
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


@pytest.fixture(scope="module")
def nvcc_major(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The major version of this machine's nvcc. Skips the test without a working one."""
    nvcc = require_nvcc(tmp_path_factory.mktemp("nvcc"))
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    return text.partition("release ")[2].partition(".")[0]


class Configured(NamedTuple):
    build: Path
    output: str


@pytest.fixture(scope="module")
def with_cuda(tmp_path_factory: pytest.TempPathFactory, nvcc_major: str) -> Configured:
    """A build folder with the CUDA parts."""
    folder = tmp_path_factory.mktemp("with_cuda")
    version = f"2.13.0+cu{nvcc_major}9"
    package = make_torch(folder / "torch", version, cuda=f"{nvcc_major}.9")
    status, output = configure(folder, f"-DLibtorch_ROOT={package}")
    assert status == 0, output
    return Configured(folder / "build", output)


def test_configure_cuda_torch_with_nvcc_builds_cuda_parts(
    with_cuda: Configured, nvcc_major: str
) -> None:
    assert f"CUDA parts    ON   (nvcc {nvcc_major}." in with_cuda.output
    assert f"libtorch for CUDA {nvcc_major}.9; architectures " in with_cuda.output


@pytest.fixture
def known_nvcc(tmp_path: Path, with_cuda: Configured) -> list[str]:
    """Options of configure(), which reuse CMake's compiler checks in its build folder.

    Otherwise it would check nvcc for fifteen seconds, which the tests below do not need.
    """
    (known,) = with_cuda.build.glob("CMakeFiles/*/CMakeCUDACompiler.cmake")
    shutil.copytree(known.parent, tmp_path / "build" / "CMakeFiles" / known.parent.name)
    cache = (with_cuda.build / "CMakeCache.txt").read_text()
    (nvcc,) = re.findall(r"^CMAKE_CUDA_COMPILER:\w+=(.*)$", cache, re.M)
    return [f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DCMAKE_PLATFORM_INFO_INITIALIZED=1"]


@pytest.fixture
def cuda_torch(tmp_path: Path, nvcc_major: str) -> Path:
    """A torch for the CUDA version of this nvcc, with the headers of CUDA's libraries."""
    major = nvcc_major
    for name in ("cublas_v2.h", "cusolverDn.h", "cusparse.h"):
        header = tmp_path / "nvidia" / f"cu{major}" / "include" / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.touch()
    return make_torch(tmp_path / "torch", f"2.13.0+cu{major}9", cuda=f"{major}.9")


def make_nccl(prefix: Path, version: str) -> Path:
    """An NCCL that consists of a header and an empty library."""
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    text = "".join(f"#define NCCL_{name} {number}\n" for name, number in numbers)
    for name, content in {"include/nccl.h": text, "lib/libnccl.so": ""}.items():
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).write_text(content)
    return prefix


def nccl_found(tmp_path: Path, output: str) -> tuple[str, str]:
    """The summary's text about NCCL, and the library that was found."""
    line = next(line for line in output.splitlines() if "NCCL backend" in line)
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text().splitlines()
    library = next(line for line in cache if line.startswith("NCCL_LIBRARY:"))
    return line.partition("NCCL backend")[2].strip(), library.partition("=")[2]


def test_configure_nccl_beside_torch_found_and_reported(
    tmp_path: Path, cuda_torch: Path, known_nvcc: list[str]
) -> None:
    nccl = make_nccl(tmp_path / "nvidia" / "nccl", "2.28.9")
    options = [f"-DLibtorch_ROOT={cuda_torch}", "-DAPEX_BUILD_PYTHON=ON", *known_nvcc]
    status, output = configure(tmp_path, *options, f"-DPython_EXECUTABLE={sys.executable}")
    assert status == 0, output
    assert nccl_found(tmp_path, output) == (
        f"ON   (NCCL 2.28.9, {nccl}/include)", f"{nccl}/lib/libnccl.so"
    )  # fmt: skip
    # The information in a wheel must not name a folder of the build.
    info = (tmp_path / "build" / "python" / "src" / "_build_info.py").read_text()
    assert "NCCL 2.28.9" in info and str(tmp_path) not in info


@pytest.mark.parametrize("how", ["option", "environment"])
@pytest.mark.parametrize("wheel", [True, False])
def test_configure_nccl_root_comes_before_the_wheel(
    tmp_path: Path, cuda_torch: Path, known_nvcc: list[str], how: str, wheel: bool
) -> None:
    if wheel:
        make_nccl(tmp_path / "nvidia" / "nccl", "2.28.9")
    mine = make_nccl(tmp_path / "mine", "2.99.1")
    options = [f"-DLibtorch_ROOT={cuda_torch}", *known_nvcc]
    environment = {}
    if how == "option":
        options.append(f"-DNCCL_ROOT={mine}")
    else:
        environment["NCCL_ROOT"] = str(mine)
    status, output = configure(tmp_path, *options, **environment)
    assert status == 0, output
    assert nccl_found(tmp_path, output) == (
        f"ON   (NCCL 2.99.1, {mine}/include)", f"{mine}/lib/libnccl.so"
    )  # fmt: skip


def test_configure_nccl_of_the_system_found(
    tmp_path: Path, cuda_torch: Path, known_nvcc: list[str]
) -> None:
    system = make_nccl(tmp_path / "usr", "2.27.3")
    options = [f"-DLibtorch_ROOT={cuda_torch}", f"-DCMAKE_PREFIX_PATH={system}", *known_nvcc]
    status, output = configure(tmp_path, *options)
    assert status == 0, output
    assert nccl_found(tmp_path, output) == (
        f"ON   (NCCL 2.27.3, {system}/include)", f"{system}/lib/libnccl.so"
    )  # fmt: skip


def test_configure_no_nccl_anywhere_off_and_says_what_to_set(
    tmp_path: Path, cuda_torch: Path, known_nvcc: list[str]
) -> None:
    if Path("/usr/include/nccl.h").exists() or Path("/usr/local/cuda/include/nccl.h").exists():
        pytest.skip("there is an NCCL on this system")
    status, output = configure(tmp_path, f"-DLibtorch_ROOT={cuda_torch}", *known_nvcc)
    assert status == 0, output
    assert "NCCL backend  OFF  (no nccl.h was found (set NCCL_ROOT))" in output


def test_configure_nvcc_of_another_major_version_off_with_both_versions(
    tmp_path: Path, nvcc_major: str, known_nvcc: list[str]
) -> None:
    other = int(nvcc_major) - 1
    package = make_torch(tmp_path / "torch", f"2.13.0+cu{other}4", cuda=f"{other}.4")
    status, output = configure(tmp_path, f"-DLibtorch_ROOT={package}", *known_nvcc)
    assert status == 0, output
    assert f"but this libtorch was built for CUDA {other}.4)" in output


# --- tests of tests: how consume.cmake determines another compiler's features ---


def test_nvcc_that_cannot_compile_is_skipped_with_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho note; echo 'error: unsupported GNU version' >&2; exit 1\n")
    nvcc.chmod(0o755)
    for given, reason in (
        (str(nvcc), f"{nvcc} -std=c++20 does not compile an empty program: error: unsupported GNU"),
        ("/nowhere/nvcc", "there is no nvcc here"),
    ):
        monkeypatch.setenv("CUDACXX", given)
        with pytest.raises(pytest.skip.Exception) as skipped:
            require_nvcc(tmp_path, "-std=c++20")
        assert reason in str(skipped.value)


@pytest.mark.parametrize("torch_fits", [True, False])
def test_consumer_fails_is_skipped_only_if_torch_alone_fails(
    tmp_path: Path, torch_fits: bool
) -> None:
    libtorch = make_torch(tmp_path / "torch", "2.13.0")
    if not torch_fits:
        header = libtorch / "include" / "torch" / "csrc" / "api" / "include" / "torch" / "torch.h"
        header.write_text("#error a newer compiler is needed\n")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(consumer CXX)\nadd_library(c a.cpp)\n"
    )
    (tmp_path / "a.cpp").write_text("#error this program is wrong\n")
    make = generator()[1:] or ["Unix Makefiles"]
    status, output = cmake(
        f"-DSOURCE={tmp_path}", f"-DBINARY={tmp_path / 'build'}", f"-DGENERATOR={make[0]}",
        "-DOPTIONS=-DONE=1|-DTWO=2", f"-DTORCH={libtorch}", "-DSTANDARD=17",
        "-P", str(ROOT / "cpp" / "tests" / "package" / "consume.cmake"),
    )  # fmt: skip
    assert status != 0
    skips = "SKIPPED: the compiler does not compile torch's headers as C++17:" in words(output)
    assert skips == (not torch_fits), output
    assert ("a newer compiler is needed" if skips else "this program is wrong") in output
