"""Where the C++ programs are that some tests run."""

import os
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _build_folders() -> list[Path]:
    if "APEX_CPP_BUILD" in os.environ:
        return [Path(os.environ["APEX_CPP_BUILD"])]
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return [ROOT / "build" / f"{tag}-{tag}-{platform}", ROOT / "build" / "cpu"]


def cpp_program(*parts: str) -> Path:
    """A program of the C++ build tree, by its path below it; skips the test where there is none."""
    for folder in _build_folders():
        program = folder.joinpath(*parts)
        if os.access(program, os.X_OK):
            return program
    pytest.skip(
        f"{parts[-1]} was not built: build with APEX_BUILD_TESTS and APEX_BUILD_EXAMPLES on, and "
        "set APEX_CPP_BUILD to the build folder"
    )


def torchrun(processes: int) -> list[str]:
    """The command that starts so many processes of a program that is no Python script."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        "--no-python",
    ]
