# SPDX-License-Identifier: BSD-3-Clause
"""docs/conf.py works on the sources alone: autodoc's imports need no built package.

test_static_analysis builds the whole site this way. This part takes seconds.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

#: Runs conf.py as Sphinx does, and imports the names on the page of the Python reference.
PROGRAM = """
import importlib, json, pathlib, runpy, sys
from sphinx.ext.autodoc.mock import mock

installed = json.loads(sys.argv[3])
if not installed:
    import importlib.util
    assert importlib.util.find_spec("apex") is None, "the package is installed"
settings = runpy.run_path(sys.argv[1])
assert settings["html_theme_options"]["source_repository"] == "https://github.com/owner/name"
for name in settings["html_css_files"] + settings["html_js_files"]:
    assert (pathlib.Path(sys.argv[1]).parent / "static" / name).is_file(), name
with mock(settings["autodoc_mock_imports"]):
    for name in json.loads(sys.argv[2]):
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name
    import apex
    from apex import _build_info
print(apex.__file__, settings["release"], *sorted(vars(_build_info)))
"""


def build_info_names() -> set[str]:
    """The names that the package reads from apex._build_info."""
    found = set()
    for path in (ROOT / "python" / "apex").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "_build_info":
                    found.add(node.attr)
    return found


def folders_without_apex(folder: Path) -> str:
    """A PYTHONPATH with the packages of this environment, except ours."""
    folders = []
    for number, entry in enumerate(map(Path, sys.path)):
        if entry.name in ("site-packages", "dist-packages") and entry.is_dir():
            copy = folder / f"packages{number}"
            copy.mkdir()
            for package in entry.iterdir():
                if not re.match(r"_?(apex|amp_C|apex_C|apex_parallel)\b", package.name):
                    (copy / package.name).symlink_to(package)
            folders.append(str(copy))
    return os.pathsep.join(folders)


@pytest.mark.parametrize("installed", [True, False], ids=["installed", "not_installed"])
def test_conf_imports_what_the_reference_names(installed: bool, tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    page = (DOCS / "api.md").read_text()
    names = re.findall(r"auto(?:class|function|exception):: ([\w.]+)", page)
    assert len(names) > 20
    environment = {**os.environ, "APEX_SOURCE_URL": "https://github.com/owner/name.git"}
    options = []
    if not installed:
        environment["PYTHONPATH"] = folders_without_apex(tmp_path)
        options = ["-S"]  # no site-packages, and none of their .pth files
    command = [
        sys.executable, *options, "-c", PROGRAM, str(DOCS / "conf.py"),
        json.dumps(names), json.dumps(installed),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    file, release, *present = done.stdout.split()
    assert Path(file).is_relative_to(ROOT / "python")
    assert re.fullmatch(r"\d+\.\d+\.\d+", release)
    assert {"with_cuda", "version"} <= build_info_names()
    assert build_info_names() - set(present) == set()


def test_no_page_waits_for_a_result() -> None:
    """benchmarks/report.py marks places for results that do not exist."""
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    assert [page.name for page in pages if "not measured yet" in page.read_text().lower()] == []
