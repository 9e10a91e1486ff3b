# SPDX-License-Identifier: BSD-3-Clause
"""The C++ package inside the installed Python package: find_package(apex) from a wheel."""

import importlib.metadata
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from package_support import CMAKE, ROOT, cmake, generator, make_torch, torchrun, words

import apex

pytestmark = pytest.mark.skipif(CMAKE is None, reason="there is no cmake on PATH")
CONSUMER = ROOT / "cpp" / "tests" / "package" / "consumer"


def test_wheel_holds_the_library_once_and_the_headers(prefix: Path) -> None:
    assert [path.name for path in (prefix / "lib").glob("libapex_parallel*")] in (
        ["libapex_parallel.so"],
        ["libapex_parallel.a"],
    )
    assert (prefix / "include" / "apex" / "parallel.h").is_file()


def test_wheel_has_the_name_apex_in_its_metadata(prefix: Path) -> None:
    if not list(prefix.parent.glob("apex_parallel-*.dist-info")):
        pytest.skip("apex is imported from a copy of its files here, not from a wheel")
    assert importlib.metadata.version("apex") == apex.__version__
    assert (prefix.parent / "amp_C").is_dir() and (prefix.parent / "apex_C").is_dir()


def test_wheel_found_by_a_consumer_builds_and_runs(prefix: Path, tmp_path: Path) -> None:
    status, output = cmake(
        "-S", str(CONSUMER), "-B", str(tmp_path), f"-Dapex_ROOT={prefix}", *generator()
    )
    assert status == 0, output
    status, output = cmake("--build", str(tmp_path))
    assert status == 0, output
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    run = subprocess.run(
        [str(tmp_path / "consumer")], env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.startswith(f"apex {apex.__version__}, "), run.stdout + run.stderr
    assert "3 buckets, refused" in run.stdout


def test_wheel_with_another_libtorch_refused_with_both_versions(
    prefix: Path, tmp_path: Path
) -> None:
    other = make_torch(tmp_path / "torch", "2.99.0+cpu")
    status, output = cmake(
        "-S", str(CONSUMER), "-B", str(tmp_path / "build"), f"-Dapex_ROOT={prefix}",
        f"-DLibtorch_ROOT={other}", *generator(),
    )  # fmt: skip
    assert status != 0
    message = words(output)
    assert f"built against libtorch {torch.__version__}" in message
    assert "holds 2.99.0+cpu: rebuild apex, or pass -DLibtorch_ROOT=" in message


def test_wheel_without_cuda_parts_refuses_that_component(prefix: Path, tmp_path: Path) -> None:
    from apex import _build_info

    if _build_info.with_cuda:
        pytest.skip("this apex has its CUDA parts")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(wants_cuda CXX)\n"
        "find_package(apex CONFIG REQUIRED COMPONENTS cuda)\n"
    )
    status, output = cmake(
        "-S", str(tmp_path), "-B", str(tmp_path / "build"), f"-Dapex_ROOT={prefix}", *generator()
    )
    assert status != 0
    assert f"built without its CUDA parts ({_build_info.cuda_reason})" in words(output)


@pytest.mark.slow
@pytest.mark.processes
def test_readme_cpp_program_built_from_an_empty_folder_trains(prefix: Path, tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("\n## C++\n")[2].partition("\n## ")[0]
    blocks = dict(re.findall(r"```(cpp|cmake)\n(.*?)```", section, re.DOTALL))
    (tmp_path / "train.cpp").write_text(blocks["cpp"])
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(train CXX)\n"
        "add_executable(train train.cpp)\n" + blocks["cmake"]
    )
    build = str(tmp_path / "build")
    status, output = cmake("-S", str(tmp_path), "-B", build, f"-Dapex_ROOT={prefix}", *generator())
    assert status == 0, output
    status, output = cmake("--build", build)
    assert status == 0, output
    run = subprocess.run(
        [*torchrun(2), str(tmp_path / "build" / "train")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
