# SPDX-License-Identifier: BSD-3-Clause
"""scripts/mutate.py: the mutants of a source, and which ones are drawn."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

SOURCE = '''"""A module."""
from __future__ import annotations

LIMIT = 1 + 1


def clipped(values, limit=3 * 1, *, scale=2):
    """Not a mutant: 1 < 2."""
    out = []
    for value in values:
        if value < limit and not value < 0:
            out.append(value * scale)
    if not out:
        raise ValueError(f"nothing below {limit + 1}")
    return out
'''


@pytest.fixture
def mutation(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from mutation import model, python

    return types.SimpleNamespace(model=model, python=python)


def found_in(mutation, folder: Path) -> list:
    (folder / "module.py").write_text(SOURCE)
    found = mutation.python.find(folder, "module.py")
    for number, mutant in enumerate(found):
        mutant.number = number
    return found


def run(mutation, found: list, active: int, monkeypatch):
    runtime = types.ModuleType("apex_mutant")
    runtime.on = lambda number: number == active
    monkeypatch.setitem(sys.modules, "apex_mutant", runtime)
    names: dict = {}
    exec(mutation.python.rewrite(SOURCE, found), names)
    return names["clipped"]


def test_script_without_tree_sitter_says_what_to_install(tmp_path):
    (tmp_path / "tree_sitter.py").write_text('raise ModuleNotFoundError(name="tree_sitter")\n')
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "mutate.py"), "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "mutate.py: there is no tree_sitter here: run `pip install tree-sitter tree-sitter-cpp`.\n"
    )


def test_python_no_mutant_on_is_the_original(mutation, tmp_path, monkeypatch):
    clipped = run(mutation, found_in(mutation, tmp_path), -1, monkeypatch)
    assert clipped([1, 3, -1, 2]) == [2, 4]
    with pytest.raises(ValueError, match="below 4"):
        clipped([])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("value < limit -> value <= limit", [2, 6, 4]),
        ("value < limit -> value >= limit", [6]),
        ("value < limit and (not value < 0) -> value < limit or not value < 0", [2, 6, -2, 4]),
        ("not value < 0 -> value < 0", [-2]),
        ("value < 0 -> value >= 0", [-2]),
        ("value * scale -> value", [1, 2]),
        ("return out -> return None", None),
    ],
)
def test_python_each_mutant_on_is_that_change_alone(
    mutation, tmp_path, monkeypatch, change, expected
):
    found = found_in(mutation, tmp_path)
    number = next(mutant.number for mutant in found if mutant.change == change)
    assert run(mutation, found, number, monkeypatch)([1, 3, -1, 2]) == expected


def test_python_text_defaults_and_module_code_are_left_out(mutation, tmp_path):
    lines = {mutant.line for mutant in found_in(mutation, tmp_path)}
    assert lines == {11, 12, 13, 15}


def test_draw_lines_that_move_keep_their_mutants(mutation, tmp_path):
    area = mutation.model.AREAS[0]

    def keys(folder: Path, source: str) -> set[str]:
        folder.mkdir()
        (folder / "module.py").write_text(source)
        found = mutation.python.find(folder, "module.py")
        for mutant in found:
            mutant.area = area.name
        drawn = mutation.model.draw(found, 1, 5 / area.quota, set(), {})
        assert [mutant.number for mutant in drawn] == [0, 1, 2, 3, 4]
        keys = {mutant.key for mutant in drawn}
        again = mutation.model.draw(found, 1, 5 / area.quota, set(), {})
        assert {mutant.key for mutant in again} == keys
        return keys

    twice = SOURCE + SOURCE.partition("LIMIT = 1 + 1\n")[2]
    moved = twice.replace("LIMIT = 1 + 1\n", "LIMIT = 2\n\n\n\n")
    assert keys(tmp_path / "a", twice) == keys(tmp_path / "b", moved)


def test_cpp_mutants_nest_and_lines_stay(mutation, tmp_path):
    pytest.importorskip("tree_sitter_cpp")
    from mutation import cpp

    source = "int f(int a, int b) {\n  if (a < b + 1) g(a);\n  throw E(a + 1);\n}\n"
    (tmp_path / "f.cpp").write_text(source)
    found = cpp.find(tmp_path, "f.cpp")
    assert {mutant.change for mutant in found} == {
        "a < b + 1 -> (a) >= (b + 1)",
        "a < b + 1 -> (a) <= (b + 1)",
        "b + 1 -> (b) - (1)",
        "g(a); -> nothing",
    }
    for number, mutant in enumerate(found):
        mutant.number = number
    text = cpp.rewrite(source, found, "f.cpp", Path("apex_mutant.h"))
    head, line, *body = text.split("\n")
    assert (head, line) == ('#include "apex_mutant.h"', '#line 1 "f.cpp"')
    assert [len(body), body[2]] == [len(source.split("\n")), "  throw E(a + 1);"]
    assert all(f"apex_mutant::on({mutant.number})" in body[1] for mutant in found)


def test_report_equivalent_mutants_are_left_out_of_the_percentage(mutation, tmp_path, monkeypatch):
    pytest.importorskip("tomllib")  # Python 3.11
    from mutation import report

    monkeypatch.setattr(report, "REASONS", tmp_path / "reasons.toml")
    entries = [("a", "Equivalent: it is not read."), ("b", "Performance only: it is slower.")]
    (tmp_path / "reasons.toml").write_text(
        "".join(
            f'[[mutant]]\nline = "{line}"\nchange = "1 -> 2"\nreason = "{reason}"\n'
            for line, reason in entries
        )
    )
    area = mutation.model.AREAS[0].name
    mutants, verdicts = [], {}
    for line, verdict in (("a", "survived"), ("b", "survived"), ("c", "survived"), ("d", "caught")):
        mutant = mutation.model.Mutant("f.cpp", 1, 1, line, "operator", "1 -> 2", area=area)
        mutant.key = line
        mutants.append(mutant)
        verdicts[line] = [verdict, "a test"]
    page = report.write(mutants, verdicts, 1)
    # Mutants, caught, by a hang, equivalent, with another reason, without: one of three is caught.
    assert "| all | 4 | 1 | 0 | 1 | 1 | 1 | 33.3 |" in page
    assert page.count("**No reason given.**") == 1
