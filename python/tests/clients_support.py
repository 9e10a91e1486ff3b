# SPDX-License-Identifier: BSD-3-Clause
"""Released packages that call apex, from the folder that scripts/clients.sh fills."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest
import torch

FOLDER = os.environ.get("APEX_CLIENTS")
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
