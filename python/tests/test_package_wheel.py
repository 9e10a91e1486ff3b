# SPDX-License-Identifier: BSD-3-Clause
"""The C++ package inside the installed Python package: find_package(apex) from a wheel."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from package_support import CMAKE, ROOT, cmake, generator, make_torch, run_torchrun, words
from packaging.requirements import Requirement
from packaging.version import Version

import apex

pytestmark = pytest.mark.skipif(CMAKE is None, reason="there is no cmake on PATH")
CONSUMER = ROOT / "cpp" / "tests" / "package" / "consumer"


def test_wheel_holds_the_library_once_and_the_headers(prefix: Path) -> None:
    names = [path.name for path in (prefix / "lib").glob("libapex_parallel*")]
    assert names == ["libapex_parallel.so"]
    assert (prefix / "include" / "apex" / "parallel.h").is_file()


@pytest.fixture(scope="module")
def wheel() -> importlib.metadata.Distribution:
    """The files of the installed wheel. Skips if apex is imported from a copy of its files."""
    try:
        return importlib.metadata.distribution("apex-parallel")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("apex is imported from a copy of its files here, not from a wheel")


def test_wheel_fits_the_torch_it_was_built_with_and_no_other(
    wheel: importlib.metadata.Distribution,
) -> None:
    (torch_requirement,) = [
        requirement
        for requirement in map(Requirement, wheel.requires or ())
        if requirement.name == "torch"
    ]
    present = Version(torch.__version__)
    assert torch_requirement.specifier.contains(present, prereleases=True)
    for other in (
        f"{present.major}.{present.minor + 1}.0",
        f"{present.major}.{present.minor - 1}.9",
    ):
        assert not torch_requirement.specifier.contains(other), other


def test_wheel_requires_what_is_imported(wheel: importlib.metadata.Distribution) -> None:
    required = {
        requirement.name
        for requirement in map(Requirement, wheel.requires or ())
        if requirement.marker is None  # not the requirements of extras
    }
    imported = set()
    for path in (ROOT / "python" / "apex").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.partition(".")[0])
    others = imported - set(sys.stdlib_module_names) - {"apex", "amp_C", "apex_C"}
    assert required == others == {"torch"}


def test_wheel_holds_no_library_of_torch(wheel: importlib.metadata.Distribution) -> None:
    libraries = [Path(str(file)).name for file in wheel.files or () if ".so" in str(file)]
    assert libraries
    assert not [name for name in libraries if re.match("lib(torch|c10|caffe)", name)]


def test_wheel_has_the_name_apex_in_its_metadata(prefix: Path) -> None:
    if not list(prefix.parent.glob("apex_parallel-*.dist-info")):
        pytest.skip("apex is imported from a copy of its files here, not from a wheel")
    assert importlib.metadata.version("apex") == apex.__version__
    assert importlib.util.find_spec("amp_C") and importlib.util.find_spec("apex_C")


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


@pytest.mark.processes
def test_readme_cpp_program_built_from_an_empty_folder_trains(prefix: Path, tmp_path: Path) -> None:
    """README contains the program. Its project file is the C++ guide's."""
    readme, guide = (ROOT / "README.md").read_text(), (ROOT / "docs/cpp.md").read_text()
    (program,) = re.findall(r"^```cpp\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    (project,) = re.findall(r"^```cmake\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.cpp").write_text(program)
    (tmp_path / "CMakeLists.txt").write_text(project)
    build = str(tmp_path / "build")
    status, output = cmake("-S", str(tmp_path), "-B", build, f"-Dapex_ROOT={prefix}", *generator())
    assert status == 0, output
    status, output = cmake("--build", build)
    assert status == 0, output
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = run_torchrun(2, f"{build}/train", cwd=tmp_path, env=env, timeout_s=600)
    assert run.returncode == 0, run.stdout + run.stderr
