# SPDX-License-Identifier: BSD-3-Clause
"""Loads released packages that use apex from the folder that scripts/clients.sh fills."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_support import free_port
from warm import run_script_on_ranks

FOLDER = os.environ.get("APEX_CLIENTS")
HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto"
#: Schemas of torchvision's operators that this module has registered. Deleting one unregisters it.
_schemas: list[torch.library.Library] = []


def load(name: str) -> Any:
    """The module `name` of a client, for ranks of a test that has called :func:`client`."""
    if FOLDER is not None:
        if FOLDER not in sys.path:  # a rank inherits the path of the test's process
            sys.path.append(FOLDER)  # last, so that the environment's packages take precedence
        if "torchvision" not in sys.modules:
            _make_torchvision_importable()
    return importlib.import_module(name)


def client(name: str) -> Any:
    """The module `name` of a client. Skips the test if it is not installed."""
    try:
        return load(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision is for another torch
        pytest.skip(f"{name} cannot be imported: {error}; run scripts/clients.sh")


def program_of(page: str, text: str) -> str:
    """The program on that page that contains `text`."""
    programs = re.findall(r"^```python\n(.*?)^```$", (HOWTO / page).read_text(), re.M | re.S)
    (found,) = [code for code in programs if text in code]
    return str(found)


def run_program(code: str, ranks: int, folder: Path, package: str = "accelerate") -> str:
    """The output of rank 0 of a program on that many ranks, with `package` and these modules on the
    path."""
    script = folder / "program.py"
    script.write_text(f"import clients_support\nclients_support.load({package!r})\n{code}")
    environment = {
        **os.environ, "PYTHONPATH": str(Path(__file__).parent), "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    done = run_script_on_ranks(ranks, script, cwd=folder, env=environment, timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _make_torchvision_importable() -> None:
    """Make PyPI's torchvision importable with a CPU build of torch.

    It is built for CUDA, and its import fails because two operators are missing. No test calls
    them, so schemas without an implementation are sufficient.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for module in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
            del sys.modules[module]  # modules imported before the error
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _schemas.append(library)
        importlib.import_module("torchvision")
