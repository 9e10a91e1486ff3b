# SPDX-License-Identifier: BSD-3-Clause
"""Checks the table of Apex's names in docs/compatibility_apex.md."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "compatibility_apex.py"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("compatibility_apex", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


table = _load()


def _find(path: str) -> Any:
    """The module or class at `path`; raises ImportError or AttributeError."""
    try:
        return importlib.import_module(path)
    except ImportError:
        owner, _, name = path.rpartition(".")
        if not owner:
            raise
        return getattr(_find(owner), name)


ROWS = [
    pytest.param(where, row, id=f"{where}.{row.name}")
    for where, rows in table.TABLE.items()
    for row in rows
]


@pytest.mark.parametrize("where, row", ROWS)
def test_name_of_apex_is_what_the_table_says(where: str, row: Any) -> None:
    assert row.became in table.MEANING
    if row.became == table.ABSENT:
        assert row.note, "what to use instead?"
        with pytest.raises((ImportError, AttributeError)):
            getattr(_find(where), row.name)
        return
    owner = _find(where)
    if where == "apex.amp.scaler.LossScaler" and not hasattr(owner, row.name):
        owner = owner("dynamic")  # the constructor sets it
    value = getattr(owner, row.name)
    if row.became == table.DIFFERS:
        assert row.note, "what is different?"
    if row.became == table.REFUSED:
        assert "Raises" in value.__doc__ and row.note
    if row.parameters:
        own = list(inspect.signature(value).parameters.values())
        names = row.parameters.split()
        assert [parameter.name for parameter in own[: len(names)]] == names
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in own[: len(names)])
        more = [
            p.name for p in own[len(names) :] if p.default is p.empty and p.kind < p.VAR_KEYWORD
        ]
        assert [name for name in more if name not in ("args", "kwargs")] == []


def test_page_is_that_of_the_table() -> None:
    assert table.PAGE.read_text() == table.render(), f"run python {SCRIPT.name}"


def test_table_has_every_name_that_the_packages_have_from_apex() -> None:
    """Public names here that are not in the table must be this package's own."""
    ours = {
        "apex": {"__version__"},
        "apex.parallel": {
            "BucketOverlap", "OverlapReport", "OverlappedOptimizer", "flat_dist_call",
            "RankTimes", "StragglerReport", "GradientStatistics", "ParameterNorms",
            "revert_syncbn_model", "stall_report",
        },
        "apex.parallel.distributed": {"ReducedBucket"},
        "apex.optimizers": {"ShardedOptimizer"},
        "apex.amp": {"compat", "frontend", "lists", "rnn_compat", "scaler"},
    }  # fmt: skip
    for where, rows in table.TABLE.items():
        public = set(getattr(_find_or_none(where), "__all__", ()))
        assert public - {row.name for row in rows} <= ours.get(where, set()), where
    for rows in table.TABLE.values():
        names = [row.name for row in rows]
        assert len(set(names)) == len(names)


def _find_or_none(path: str) -> Any:
    try:
        return _find(path)
    except (ImportError, AttributeError):
        return None


def test_page_is_linked() -> None:
    index = (SCRIPT.parent / "index.md").read_text()
    assert "(compatibility_apex.md)" in index and "\ncompatibility_apex\n" in index
    assert "(compatibility_apex.md)" in (SCRIPT.parent / "migration.md").read_text()
