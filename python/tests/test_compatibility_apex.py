# SPDX-License-Identifier: BSD-3-Clause
"""Every name of Apex is what docs/compatibility_apex.md says."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility_apex.md"


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
