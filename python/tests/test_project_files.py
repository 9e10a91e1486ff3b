# SPDX-License-Identifier: BSD-3-Clause
"""Files that users and services read: extras, commands, long description, workflows, Dockerfile."""

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
    """The extras that a text recommends to install."""
    return [
        extra
        for group in re.findall(r"(?:apex-parallel|\.)\[([\w,-]+)\]\"?", text)
        for extra in group.split(",")
    ]


def test_extras_that_pages_name_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    named = {extra for page in pages for extra in extras(page.read_text())}
    assert {"examples", "plots"} <= named <= set(PROJECT["optional-dependencies"])


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


# --- workflows, Dockerfile, templates ---

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
#: Arguments that scripts/test.sh passes to pytest.
OF_PYTEST = {"--collect-only", "-q"}


def read(path: Path) -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict), path
    return content


def jobs(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read(ROOT / ".github" / "workflows" / name)["jobs"]
    return found


def matrix_of(job: dict[str, Any]) -> dict[str, set[str]]:
    """The values of each key of a job's matrix."""
    matrix = dict(job.get("strategy", {}).get("matrix", {}))
    included = matrix.pop("include", [])
    matrix.pop("exclude", None)
    values = {key: set(entries) for key, entries in matrix.items()}
    for entry in included:
        for key, value in entry.items():
            values.setdefault(key, set()).add(value)
    return values


def test_workflows_pin_each_action_to_one_commit_with_its_version() -> None:
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for used in re.findall(r"^.*\buses:.*$", path.read_text(), re.M):
            pinned = re.search(r"uses: ([\w/-]+)@([0-9a-f]{40} # v\d+\.\d+\.\d+)$", used)
            assert pinned is not None, f"{path.name}: {used}"
            pins.setdefault(pinned[1], set()).add(pinned[2])
    assert pins
    assert {action for action, commits in pins.items() if len(commits) > 1} == set()


@pytest.mark.parametrize("name", [path.name for path in WORKFLOWS])
def test_workflow_names_jobs_and_matrix_keys_that_exist(name: str) -> None:
    assert "permissions" in read(ROOT / ".github" / "workflows" / name)
    for job, content in jobs(name).items():
        needs = content.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs(name)), job
        used = set(re.findall(r"\bmatrix\.(\w+)", str(content)))
        assert used == set(matrix_of(content)), job
        for key, value in re.findall(r"\bmatrix\.(\w+) == '([^']*)'", str(content)):
            assert value in matrix_of(content)[key], f"{job}: {key} is never {value}"


def test_check_that_branches_require_needs_every_job() -> None:
    found = jobs("tests.yml")
    assert set(found["required"]["needs"]) == set(found) - {"required"}
    assert found["required"]["if"] == "always()"
    assert matrix_of(found["sanitizers"])["sanitizer"] == {"asan", "tsan"}


@pytest.fixture
def tested() -> set[tuple[str, str]]:
    """The versions of torch and Python (minor) in each row of docs/compatibility.md."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = re.findall(r"^\| (\d[\d.]+)(?:\+\w+)? *\|[^|]*\| (\d+\.\d+)", page, re.M)
    assert rows
    return set(rows)


def test_workflows_run_the_versions_that_are_supported(tested: set[tuple[str, str]]) -> None:
    rows = {
        (entry["torch"], entry["python"])
        for entry in jobs("tests.yml")["tests"]["strategy"]["matrix"]["include"]
    }
    assert rows == tested
    released = matrix_of(jobs("release.yml")["wheels"])
    assert released["torch"] == {torch for torch, _ in tested}
    assert released["python"] == {python for _, python in tested}
    assert released["flavor"] == {"cpu", "cuda"}

    def minor(version: str) -> list[int]:
        return [int(part) for part in version.split(".")[:2]]

    least_python = min((python for _, python in tested), key=minor)
    assert PROJECT["requires-python"] == f">={least_python}"
    least_torch = min((torch for torch, _ in tested), key=minor)
    metadata = (ROOT / "cmake" / "wheel_metadata.py").read_text()
    assert f'LEAST_TORCH = "{".".join(map(str, minor(least_torch)))}"' in metadata


def test_released_torch_is_given_the_cuda_that_it_was_built_for() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    built = dict(re.findall(r"^\| (\d[\d.]+) *\| CUDA (\d+\.\d+)", page, re.M))
    given = {
        entry["torch"]: entry["cuda"]
        for entry in jobs("release.yml")["wheels"]["strategy"]["matrix"]["include"]
    }
    assert {torch: given[torch] for torch in built} == built


def commands() -> list[tuple[str, str]]:
    """The location and text of each command, on one line."""
    found = [
        (f"{path.name}: {job}", " ".join(step["run"].split()))
        for path in WORKFLOWS
        for job, content in jobs(path.name).items()
        for step in content["steps"]
        if "run" in step
    ]
    container = (ROOT / ".devcontainer" / "devcontainer.json").read_text()
    found += [("devcontainer.json", re.search(r'"postCreateCommand": "(.*)"', container)[1])]  # type: ignore[index]
    docker = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return found + [("Dockerfile", line) for line in re.findall(r"^(?:RUN|CMD) .*$", docker, re.M)]


def test_workflows_call_scripts_that_exist_with_options_that_they_take() -> None:
    called = set()
    for place, command in commands():
        for script, arguments in re.findall(
            r"bash (\.?\w[\w./-]*)([^&|']*(?:'[^']*'[^&|']*)*)", command
        ):
            path = ROOT / script
            assert path.is_file(), f"{place}: {script}"
            called.add(script)
            text = path.read_text()
            outside_quotes = re.sub(r"\"[^\"]*\"|'[^']*'", "", arguments)
            options = set(re.findall(r"(?<!\S)--?[a-z][\w-]*", outside_quotes))
            if script == "scripts/test.sh":
                options -= OF_PYTEST
            missing = {option for option in options if not re.search(rf"{option}\b", text)}
            assert missing == set(), f"{place}: {script}"
    assert called == {
        ".ci/run", ".github/install_nvcc.sh", "scripts/analyze.sh", "scripts/release.sh",
        "scripts/sanitize.sh", "scripts/test.sh",
    }  # fmt: skip


def test_sanitizers_run_programs_and_tests_that_exist() -> None:
    lists = (ROOT / "cpp" / "tests" / "CMakeLists.txt").read_text()
    text = " ".join(command for place, command in commands() if place == "tests.yml: sanitizers")
    programs = re.findall(r"--program (\w+)", text)
    assert set(programs) == {"apex_kernel_tests", "apex_hosts_tests"}
    assert [name for name in programs if f"apex_add_test({name}\n" not in lists] == []
    (pattern,) = re.findall(r"--tests '\*(\w+)\*'", text)
    sources = re.search(r"apex_add_test\(apex_kernel_tests\n.*?\n\)", lists, re.S)
    assert sources is not None
    tests = "".join(
        (ROOT / "cpp" / "tests" / name).read_text()
        for name in re.findall(r"^\s+([\w/]+\.cpp)$", sources[0], re.M)
    )
    assert len(re.findall(rf"^TEST\w*\((?:\w*{pattern}\w*,|\w+, *\w*{pattern})", tests, re.M)) >= 10


def test_dockerfile_builds_supported_versions_and_starts_what_exists(
    tested: set[tuple[str, str]],
) -> None:
    text = (ROOT / "Dockerfile").read_text()
    default = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.M))
    assert (default["TORCH"], default["PYTHON"]) in tested
    stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.M)
    assert re.findall(r"--from=(\w+)", text) == ["build"]
    container = (ROOT / ".devcontainer" / "devcontainer.json").read_text()
    assert re.search(r'"target": "(\w+)"', container)[1] in stages  # type: ignore[index]
    extras_installed = extras(text.replace("/sources[", "apex-parallel["))
    assert set(extras_installed) <= set(PROJECT["optional-dependencies"])
    module = re.search(r'^CMD \["python", "-m", "([\w.]+)"\]$', text, re.M)
    assert module is not None and importlib.util.find_spec(module[1]) is not None
    run = " ".join(command for place, command in commands() if place == "tests.yml: container")
    scripts = re.findall(r"(?<!\S)\w+/\w+\.py(?!\S)", f"{run} {text}")
    assert scripts
    for script in scripts:
        assert (ROOT / "examples" / script).is_file(), script
    assert "docker run --rm apex-parallel docker" in run  # the default command: the demo


def test_dockerignore_keeps_what_a_build_needs() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().splitlines())
    needed = {
        "CMakeLists.txt",
        "LICENSE",
        "README.md",
        "cmake",
        "cpp",
        "examples",
        "pyproject.toml",
    }
    assert ignored.isdisjoint(needed | {"python"})


def test_issue_forms_are_complete_and_the_bug_form_asks_for_the_doctor() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    for path in sorted(folder.glob("*.yml")):
        form = read(path)
        if path.name == "config.yml":
            continue
        assert form["name"] and form["description"]
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert ids and len(ids) == len(set(ids))
    assert "python -m apex.doctor" in (folder / "bug.yml").read_text()
    for name in (".github/ISSUE_TEMPLATE/bug.yml", ".github/pull_request_template.md"):
        text = (ROOT / name).read_text()
        for page in re.findall(r"blob/main/([\w./-]+)|`((?:docs/)?[\w/-]+\.md)`", text):
            assert (ROOT / (page[0] or page[1])).is_file(), page
