# SPDX-License-Identifier: BSD-3-Clause
"""scripts/venv.sh: what it refuses, and when it rebuilds the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "venv.sh"

pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None or shutil.which("git") is None, reason="needs bash and git"
)


def bash(script: Path, command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source {script}; {command}"],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=600,
    )


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Checkout:
    """A small repository with venv.sh, and an environment whose pip only records its calls."""

    def __init__(self, root: Path) -> None:
        self.script = root / "scripts" / "venv.sh"
        self.source = root / "cpp" / "src" / "engine.cpp"
        self.test = root / "cpp" / "tests" / "engine_test.cpp"
        self.venv = root / "venv"
        self.pip_calls = root / "pip-calls"
        self.pip_fails = root / "pip-fails"
        for file in (self.source, self.test, root / "CMakeLists.txt", self.script):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("1")
        shutil.copy(SCRIPT, self.script)
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        (root / ".git" / "info" / "exclude").write_text("/venv\n/pip-*\n")
        executable(
            self.venv / "bin" / "python",
            f"""#!/bin/sh
if [ "$1 $2" = "-m pip" ]; then
  echo "$@" >>{self.pip_calls}
  echo "output of pip"
  [ ! -e {self.pip_fails} ]
  exit
fi
exec {sys.executable} "$@"
""",
        )

    def install(self) -> subprocess.CompletedProcess[str]:
        return bash(self.script, f"apex_install_package {self.venv}", CXX="sh")

    def builds(self) -> int:
        return len(self.pip_calls.read_text().splitlines()) if self.pip_calls.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


SCRIPTS = [*SCRIPT.parent.glob("*.sh"), SCRIPT.parents[1] / "examples" / "mnist" / "run.sh"]


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s != SCRIPT], ids=lambda path: path.stem)
def test_script_help_prints_its_head_and_does_nothing_else(script: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    done = subprocess.run(
        ["bash", str(script), "--help"],
        cwd=tmp_path,
        env={**os.environ, "APEX_VENV": str(venv)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    head = script.read_text().splitlines()[2]
    assert done.stdout.startswith(head.removeprefix("# ") + "\n")
    assert "Environment: " in done.stdout and "SPDX" not in done.stdout
    assert "#" not in done.stdout and "set -" not in done.stdout
    assert not venv.exists()


@pytest.mark.parametrize("how", ["its own folder", "CDPATH", "a link"])
@pytest.mark.parametrize("script", [s for s in SCRIPTS if s != SCRIPT], ids=lambda path: path.stem)
def test_script_is_found_however_it_is_called(script: Path, how: str, tmp_path: Path) -> None:
    root = SCRIPT.parents[1]
    folder, name = root, str(script.relative_to(root))
    if how == "its own folder":
        folder, name = script.parent, script.name
    elif how == "a link":
        (tmp_path / "link").symlink_to(script)
        folder, name = tmp_path, "link"
    (tmp_path / "scripts").mkdir()  # CDPATH leads here
    done = subprocess.run(
        ["bash", name, "--help"],
        cwd=folder,
        env={**os.environ, "CDPATH": f"{tmp_path}:."},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Environment: " in done.stdout and "===" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["matrix.sh", "--row=x"], "matrix.sh has no option --row=x; --help lists them"),
        (["matrix.sh", "--rows"], "--rows needs a pattern"),
        (["matrix.sh", "--rows", "no*"], "no row fits no*; --list shows all of them"),
        (["analyze.sh", "--al"], "analyze.sh has no option --al; --help lists them"),
        (["analyze.sh", "rust"], "there is no tool rust; --help lists them"),
        (["analyze.sh", "--base"], "--base needs a revision"),
        (["sanitize.sh", "msan"], "sanitize.sh has no argument msan; --help lists them"),
        (["sanitize.sh", "--tests"], "--tests needs a filter"),
    ],
)
def test_script_bad_argument_ends_with_2_and_one_sentence(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    script, *rest = arguments
    done = subprocess.run(
        ["bash", str(SCRIPT.parent / script), *rest],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (2, f"error: {words}\n")


@pytest.mark.parametrize(("options", "least"), [((), 4), (("--cuda",), 1)])
def test_matrix_without_home_lists_every_row(options: tuple[str, ...], least: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "PYENV_ROOT")}
    done = subprocess.run(
        ["bash", str(SCRIPT.parent / "matrix.sh"), "--list", "--rows", "torch2.15*", *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert len(rows) >= least
    assert all(row.endswith("-cuda") == bool(options) for row in rows)


def test_check_types_no_python_fails_with_one_sentence() -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT.parent / "check_types.sh")],
        env={**os.environ, "PYTHON": "/nowhere/python3"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert "there is no /nowhere/python3 here" in done.stderr


def test_ensure_venv_old_python_fails_with_one_sentence(tmp_path: Path) -> None:
    old = executable(tmp_path / "python3.9", "#!/bin/sh\nexit 1\n")
    done = bash(SCRIPT, f"apex_ensure_venv {tmp_path}/venv", PYTHON=str(old))
    assert done.returncode != 0
    assert done.stderr == (
        f"error: {old} is not a working Python 3.10 or newer: set PYTHON to one.\n"
    )
    assert not (tmp_path / "venv").exists()


def test_ensure_venv_no_python_fails_with_one_sentence(tmp_path: Path) -> None:
    done = bash(SCRIPT, f"apex_ensure_venv {tmp_path}/venv", PYTHON="/nowhere/python3")
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert "there is no /nowhere/python3 here" in done.stderr


def test_release_old_python_fails_with_one_sentence(tmp_path: Path) -> None:
    old = executable(tmp_path / "python3.9", "#!/bin/sh\nexit 1\n")
    done = subprocess.run(
        ["bash", str(SCRIPT.parent / "release.sh"), "--output", str(tmp_path / "dist"), "torch"],
        env={**os.environ, "PYTHON": str(old)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert done.stderr == (
        f"error: {old} is not a working Python 3.10 or newer: set PYTHON to one.\n"
    )


def test_ensure_venv_failure_deletes_only_what_it_made(tmp_path: Path) -> None:
    python = executable(
        tmp_path / "python", f'#!/bin/sh\n[ "$2" != venv ] && exec {sys.executable} "$@"\n'
    )
    mine, file = tmp_path / "folder" / "mine", tmp_path / "file"
    mine.parent.mkdir()
    mine.write_text("precious")
    file.write_text("precious")
    for given in (mine.parent, file, tmp_path / "new"):
        done = bash(SCRIPT, f"apex_ensure_venv {given}", PYTHON=str(python))
        assert done.returncode != 0
        assert "cannot make virtual environments" in done.stderr
    assert mine.read_text() == file.read_text() == "precious"
    assert not (tmp_path / "new").exists()


def test_relative_paths_of_environments_work(tmp_path: Path) -> None:
    """A folder next to them is not mistaken for an installed module."""
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "__init__.py").touch()
    questions = "apex_has_module ./python json; ! apex_has_module ./python beside"
    done = bash(SCRIPT, f"cd {tmp_path}; {questions}; . {SCRIPT}; echo $APEX_VENV", APEX_VENV="a")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{Path.cwd()}/a\n"


def test_install_package_unchanged_sources_builds_once(checkout: Checkout) -> None:
    assert checkout.install().returncode == 0
    again = checkout.install()
    assert again.returncode == 0
    assert again.stdout == f"apex-parallel in {checkout.venv} is up to date\n"
    assert checkout.builds() == 1


def test_install_package_changed_or_new_source_builds_again(checkout: Checkout) -> None:
    checkout.install()
    checkout.source.write_text("2")
    assert checkout.install().returncode == 0
    assert checkout.builds() == 2
    checkout.source.with_name("new.cpp").write_text("1")
    checkout.install()
    assert checkout.builds() == 3
    checkout.source.unlink()
    checkout.install()
    assert checkout.builds() == 4


def test_install_package_changed_test_does_not_build_again(checkout: Checkout) -> None:
    checkout.install()
    checkout.test.write_text("2")
    checkout.install()
    assert checkout.builds() == 1


def test_install_package_outside_git_sees_changes_too(checkout: Checkout) -> None:
    shutil.rmtree(checkout.venv.parent / ".git")
    checkout.install()
    checkout.install()
    assert checkout.builds() == 1
    checkout.source.write_text("2")
    checkout.install()
    assert checkout.builds() == 2


def test_install_package_failed_build_shows_why_and_is_tried_again(checkout: Checkout) -> None:
    checkout.pip_fails.touch()
    failed = checkout.install()
    assert failed.returncode != 0
    assert "output of pip" in failed.stderr
    checkout.pip_fails.unlink()
    good = checkout.install()
    assert good.returncode == 0
    assert "output of pip" not in good.stdout + good.stderr
    assert checkout.builds() == 2


def test_install_package_no_compiler_fails_with_one_sentence(checkout: Checkout) -> None:
    # A PATH with the tools that the script itself needs, but no compiler.
    tools = checkout.venv.parent / "pip-tools"
    tools.mkdir()
    for tool in ("cat", "dirname", "git", "mktemp", "readlink", "rm", "awk", "getconf", "sh"):
        found = shutil.which(tool)
        if found:
            (tools / tool).symlink_to(found)
    done = subprocess.run(
        [
            shutil.which("bash") or "bash",
            "-c",
            f"set -euo pipefail; source {checkout.script}; apex_install_package {checkout.venv}",
        ],
        capture_output=True,
        text=True,
        env={**{k: v for k, v in os.environ.items() if k != "CXX"}, "PATH": str(tools)},
        timeout=600,
    )
    assert done.returncode != 0
    assert "there is no C++ compiler here" in done.stderr
    assert checkout.builds() == 0
