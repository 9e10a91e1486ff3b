# SPDX-License-Identifier: BSD-3-Clause
"""What users and services read: extras, commands, the long description, workflows, Dockerfile."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


# --- the package ---


def extras(text: str) -> list[str]:
    """The extras that a text tells its reader to install."""
    return [
        extra
        for group in re.findall(r"(?:apex-parallel|\.)\[([\w,-]+)\]\"?", text)
        for extra in group.split(",")
    ]


def test_extras_that_pages_name_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    named = {extra for page in pages for extra in extras(page.read_text())}
    assert {"examples", "lightning", "plots"} <= named <= set(PROJECT["optional-dependencies"])


def test_extra_examples_holds_what_the_mnist_example_requires() -> None:
    listed = (ROOT / "examples" / "mnist" / "requirements.txt").read_text().split()
    assert set(listed) <= set(PROJECT["optional-dependencies"]["examples"])


@pytest.mark.parametrize("command", PROJECT["scripts"])
def test_command_calls_a_function_that_returns_the_exit_code(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _, name = PROJECT["scripts"][command].partition(":")
    main = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()  # as a console script calls it
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


@pytest.fixture
def readme(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """cmake/wheel_readme.py, as scikit-build-core loads it: from the folder of the sources."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("APEX_SOURCE_URL", raising=False)
    path = ROOT / "cmake" / "wheel_readme.py"
    spec = importlib.util.spec_from_file_location("wheel_readme", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md#b)", "[a](S/blob/T/docs/a.md#b)"),
        ("[the `a`](a.md) and [b](b)", "[the `a`](S/blob/T/a.md) and [b](S/blob/T/b)"),
        ("![a](a.png)", "![a](S/raw/T/a.png)"),
        ('<img src="a.svg"> <a href="b.md">', '<img src="S/raw/T/a.svg"> <a href="S/blob/T/b.md">'),
        ("[a](https://b.org/c) [d](#e)", "[a](https://b.org/c) [d](#e)"),
        ("`[](int x)` [a](b)", "`[](int x)` [a](S/blob/T/b)"),
        ("```cpp\n[](int x) {}\n```\n[a](b)", "```cpp\n[](int x) {}\n```\n[a](S/blob/T/b)"),
    ],
)
def test_relative_links_become_absolute(readme: ModuleType, text: str, expected: str) -> None:
    assert readme.with_absolute_links(text, "S", "T") == expected


def test_long_description_with_a_source_has_no_relative_link(
    readme: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "https://github.com/OWNER/NAME"
    monkeypatch.setenv("APEX_SOURCE_URL", source + "/")
    fields = readme.Provider().dynamic_metadata({}, {"version": "1.2.3+torch2.13.cpu"})
    text = re.sub(r"^```.*?^```$", "", fields["readme"]["text"], flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert f"{source}/blob/v1.2.3/docs/install.md" in targets
    assert [target for target in targets if not re.match(r"https?:|#", target)] == []
    assert fields["urls"]["Source"] == source
    assert fields["urls"]["Issues"] == f"{source}/issues"


def test_long_description_without_a_source_is_the_readme(readme: ModuleType) -> None:
    fields = readme.Provider().dynamic_metadata({}, {"version": "1.2.3"})
    assert fields == {
        "readme": {"content-type": "text/markdown", "text": (ROOT / "README.md").read_text()},
        "urls": {},
    }
