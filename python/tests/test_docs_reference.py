# SPDX-License-Identifier: BSD-3-Clause
"""The reference has every public name, option and environment variable, and no foreign error."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import apex

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MODULES = (
    "apex",
    "apex.parallel",
    "apex.parallel.distributed",
    "apex.amp",
    "apex.fp16_utils",
    "apex.optimizers",
    "apex.normalization",
    "apex.normalization.fused_layer_norm",
    "apex.multi_tensor_apply",
    "amp_C",
    "apex_C",
)


@pytest.mark.parametrize("module", MODULES)
def test_python_reference_has_every_public_name(module: str) -> None:
    page = (DOCS / "api.md").read_text()
    names = importlib.import_module(module).__all__
    assert names
    # In a directive, in a list of members, or in code within a sentence.
    assert [name for name in names if not re.search(rf"(?<![A-Za-z]){name}(?!\w)", page)] == []


def test_every_public_method_of_parallel_has_a_docstring() -> None:
    found = 0
    for name in apex.parallel.distributed.__all__ + apex.parallel.__all__:
        value = getattr(apex.parallel.distributed, name, None) or getattr(apex.parallel, name)
        assert inspect.getdoc(value), name
        for kind in inspect.getmro(value) if inspect.isclass(value) else ():
            members = vars(kind) if kind.__module__.startswith("apex.") else {}
            for member in (one for one in members if not one.startswith("_")):
                described = inspect.getdoc(getattr(value, member))
                assert described or not callable(members[member]), f"{name}.{member}"
                found += 1
    assert found > 50


def test_options_of_the_wrapper_are_explained_with_their_defaults() -> None:
    page = (DOCS / "distributed_data_parallel.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `([^`]*)` \|", page, re.M)
    table = {option: default for names, default in rows for option in re.findall(r"`(\w+)`", names)}
    parameters = inspect.signature(apex.parallel.DistributedDataParallel).parameters
    wanted = {name: str(p.default) for name, p in parameters.items() if name != "module"}
    assert {name: table.get(name) for name in wanted} == wanted


def test_environment_variables_are_listed() -> None:
    page = (DOCS / "api.md").read_text()
    text = "".join(path.read_text() for path in (ROOT / "cpp" / "src").rglob("*.cpp"))
    read = set(re.findall(r'(?:getenv|process_environment)\("(\w+)"\)', text))
    assert "APEX_HOST_CHANNEL" in read
    assert [name for name in read if f"`{name}`" not in page] == []
