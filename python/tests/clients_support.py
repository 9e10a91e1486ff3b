# SPDX-License-Identifier: BSD-3-Clause
"""Released packages that call apex, from the folder that scripts/clients.sh fills."""

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
#: What torch knows of torchvision's operators, if this module had to say it; gone with the object.
_schemas: list[torch.library.Library] = []


def load(name: str) -> Any:
    """The module `name` of a client; for ranks, whose test has called :func:`client`."""
    if FOLDER is not None:
        if FOLDER not in sys.path:  # a rank has the path of the test's process
            sys.path.append(FOLDER)  # behind everything else: the environment counts first
        if "torchvision" not in sys.modules:
            _make_torchvision_importable()
    return importlib.import_module(name)


def client(name: str) -> Any:
    """The module `name` of a client; the test is skipped where it is not installed."""
    try:
        return load(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision for another torch
        pytest.skip(f"{name} cannot be imported: {error}; run scripts/clients.sh")


def program_of(page: str, text: str) -> str:
    """The program of that page in which `text` is."""
    programs = re.findall(r"^```python\n(.*?)^```$", (HOWTO / page).read_text(), re.M | re.S)
    (found,) = [code for code in programs if text in code]
    return str(found)


def run_program(code: str, ranks: int, folder: Path, package: str = "accelerate") -> str:
    """What rank 0 prints when that many ranks run it. It finds the clients and these modules."""
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
    """PyPI's torchvision is for a torch with CUDA; beside one for the CPU it lacks its operators.

    Importing it then fails where it describes two of them to torch. No test calls one, so that
    schemas without an implementation will do.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for module in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
            del sys.modules[module]  # what was imported before the error
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _schemas.append(library)
        importlib.import_module("torchvision")
