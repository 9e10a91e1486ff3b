# SPDX-License-Identifier: BSD-3-Clause
"""A script's ``torch.set_default_device`` does not affect the tensors that the package creates."""

from __future__ import annotations

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

import amp_C
import apex
import apex_C

FACTORIES = {function.__name__ for function in _device_constructors()}


def _without_device(source: str) -> list[str]:
    """Calls of torch's functions that create a tensor on the default device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in FACTORIES
        and "device" not in {keyword.arg for keyword in call.keywords}
    ]


def test_every_tensor_of_the_package_names_its_device() -> None:
    found = {}
    for package in (apex, amp_C, apex_C):
        for path in Path(package.__file__).parent.rglob("*.py"):
            text = path.read_text()
            # A name without its module would not be detected.
            assert "from torch import *" not in text
            imported = [
                alias.name
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ImportFrom) and node.module == "torch"
                for alias in node.names
            ]
            assert not FACTORIES.intersection(imported), path
            if calls := _without_device(text):
                found[str(path)] = calls
    assert not found
    assert _without_device("x = torch.zeros(3)") and not _without_device("x = torch.zeros_like(y)")
