# SPDX-License-Identifier: BSD-3-Clause
"""The reference has every public name, option and environment variable, and every name of Apex is
what docs/compatibility_apex.md says."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

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


def test_private_names_of_torch_are_listed() -> None:
    page = (DOCS / "compatibility.md").read_text()
    spaces: list[Any] = [
        torch, torch._C, torch._C._distributed_c10d, torch.Tensor, torch.optim.SGD([torch.ones(1)]),
        distributed_c10d, distributed_c10d.ProcessGroup, nn.parallel.DistributedDataParallel,
        nn.BatchNorm1d(1), nn.modules.batchnorm,
    ]  # fmt: skip
    trees = [ast.parse(path.read_text()) for path in (ROOT / "python" / "apex").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in nodes if ast.unparse(node.value) not in ("self", "cls")}
    private = {name for name in used if re.match(r"_(?!_|C$|foreach_)", name)}
    private = {name for name in private if any(hasattr(space, name) for space in spaces)}
    assert len(private) > 20
    assert [name for name in private if f"`{name}`" not in page] == []


def test_environment_variables_are_listed() -> None:
    page = (DOCS / "api.md").read_text()
    text = "".join(path.read_text() for path in (ROOT / "cpp" / "src").rglob("*.cpp"))
    read = set(re.findall(r'(?:getenv|process_environment)\("(\w+)"\)', text))
    assert "APEX_HOST_CHANNEL" in read
    assert [name for name in read if f"`{name}`" not in page] == []


PAGE = DOCS / "compatibility_apex.md"


class Row(NamedTuple):
    where: str
    name: str
    parameters: list[str]  #: of Apex; empty if not a function, or not compared
    became: str
    note: str


def _rows() -> list[Row]:
    found = []
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]:
        where = section.split("`")[1]
        for name, parameters, became, note in re.findall(
            r"^\| `(\w+)(?:\(([\w, ]*)\))?` \| (\w+) \| (.*?) ?\|$", section, re.M
        ):
            names = parameters.split(", ") if parameters else []
            found.append(Row(where, name, names, became, note))
    return found


ROWS = _rows()


def _find(path: str) -> Any:
    """The module or class at `path`; raises ImportError or AttributeError."""
    try:
        return importlib.import_module(path)
    except ImportError:
        owner, _, name = path.rpartition(".")
        if not owner:
            raise
        return getattr(_find(owner), name)


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row.where}.{row.name}") for row in ROWS])
def test_name_of_apex_is_what_the_table_says(row: Row) -> None:
    assert row.became in ("same", "differs", "refused", "absent")
    assert row.note or row.became == "same", "what is different, or what to use instead?"
    if row.became == "absent":
        with pytest.raises((ImportError, AttributeError)):
            getattr(_find(row.where), row.name)
        return
    owner = _find(row.where)
    if row.where == "apex.amp.scaler.LossScaler" and not hasattr(owner, row.name):
        owner = owner("dynamic")  # the constructor sets it
    value = getattr(owner, row.name)
    if row.became == "refused":
        assert "Raises" in value.__doc__
    if row.parameters:
        own = list(inspect.signature(value).parameters.values())
        count = len(row.parameters)
        assert [parameter.name for parameter in own[:count]] == row.parameters
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in own[:count])
        more = [p.name for p in own[count:] if p.default is p.empty and p.kind < p.VAR_KEYWORD]
        assert [name for name in more if name not in ("args", "kwargs")] == []


def test_table_is_read() -> None:
    assert len(ROWS) > 200
    assert len({(row.where, row.name) for row in ROWS}) == len(ROWS)
    assert sum(bool(row.parameters) for row in ROWS) > 70
