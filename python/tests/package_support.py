"""Where the C++ programs are that some tests run."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch.distributed.run
from warm import run_script

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


def _torchrun_options(processes: int) -> list[str]:
    return ["--standalone", f"--nproc-per-node={processes}", "--no-python"]


def torchrun(processes: int) -> list[str]:
    """The command that starts so many processes of a program that is no Python script."""
    return [sys.executable, "-m", "torch.distributed.run", *_torchrun_options(processes)]


def run_torchrun(
    processes: int, *command: str, cwd: Path, env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Runs ``torchrun(processes)``, forked from a process that has imported torch: see warm."""
    script, options = torch.distributed.run.__file__, _torchrun_options(processes)
    return run_script(script, *options, *command, cwd=cwd, env=env, timeout_s=timeout_s)
