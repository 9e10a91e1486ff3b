# SPDX-License-Identifier: BSD-3-Clause
"""C++ programs that some tests run, and cmake for tests that build some."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch.distributed.run
from warm import run_script

ROOT = Path(__file__).resolve().parents[2]
CMAKE = shutil.which("cmake")


def _build_folders() -> list[Path]:
    if "APEX_CPP_BUILD" in os.environ:
        return [Path(os.environ["APEX_CPP_BUILD"])]
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return [ROOT / "build" / f"{tag}-{tag}-{platform}", ROOT / "build" / "cpu"]


def cpp_program(*parts: str) -> Path:
    """A program of the C++ build tree, by its path in it. Skips the test if it does not exist."""
    for folder in _build_folders():
        program = folder.joinpath(*parts)
        if os.access(program, os.X_OK):
            return program
    pytest.skip(
        f"{parts[-1]} was not built: build with APEX_BUILD_TESTS and APEX_BUILD_EXAMPLES on, and "
        "set APEX_CPP_BUILD to the build folder"
    )


def run_torchrun(
    processes: int, *command: str, cwd: Path, env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a program that is no Python script with torchrun, forked from a process that has imported
    torch (see warm)."""
    # Resolving this host's name may take seconds to fail.
    options = ["--standalone", "--local-addr=localhost", f"--nproc-per-node={processes}"]
    script = torch.distributed.run.__file__
    whole = [*options, "--no-python", *command]
    return run_script(script, *whole, cwd=cwd, env=env, timeout_s=timeout_s)


def make_torch(folder: Path, version: str, cuda: str | None = None, archive: bool = False) -> Path:
    """A folder that looks like a torch package, or like an unpacked libtorch archive."""
    major, minor, patch = version.split("+")[0].split(".")
    files = {
        "include/torch/csrc/api/include/torch/torch.h": "",
        "include/ATen/ATen.h": "",
        "include/torch/headeronly/version.h": (
            f"#define TORCH_VERSION_MAJOR {major}\n"
            f"#define TORCH_VERSION_MINOR {minor}\n"
            f"#define TORCH_VERSION_PATCH {patch}\n"
        ),
        "share/cmake/Torch/TorchConfig.cmake": 'set(FLAGS "-D_GLIBCXX_USE_CXX11_ABI=1")\n',
        "lib/libc10.so": "",
        "lib/libtorch_cpu.so": "",
        "lib/libtorch.so": "",
    }
    if cuda is not None:
        files |= {"lib/libc10_cuda.so": "", "lib/libtorch_cuda.so": ""}
    if archive:
        files["build-version"] = version + "\n"
    else:
        files["lib/libtorch_python.so"] = ""
        files["version.py"] = f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n"
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def cmake(*arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code and output of cmake, in an environment that does not name a torch."""
    hidden = (
        "Libtorch_ROOT", "Torch_ROOT", "TORCH_INSTALL_PREFIX", "CMAKE_PREFIX_PATH", "Torch_DIR",
        "NCCL_ROOT", "SKBUILD",
    )  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name not in hidden} | environment
    result = subprocess.run(
        [str(CMAKE), *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return result.returncode, result.stdout


def words(text: str) -> str:
    """Undo CMake's line breaks in messages, whose positions do not matter to tests."""
    return " ".join(text.split())


def generator() -> list[str]:
    return ["-G", "Ninja"] if shutil.which("ninja") else []
