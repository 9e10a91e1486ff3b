# SPDX-License-Identifier: BSD-3-Clause
"""The stubs of apex._core exist, are complete, and pass a type checker."""

import ast
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import apex
from apex import _build_info, _core

STUB = Path(_core.__file__).parent / "_core.pyi"


def members(tree: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    kinds = (ast.ClassDef, ast.FunctionDef)
    found: dict[str, ast.AST] = {node.name: node for node in tree.body if isinstance(node, kinds)}
    if isinstance(tree, ast.ClassDef):  # constants, and members of an enumeration
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            found |= {name.id: node for name in targets if isinstance(name, ast.Name)}
    return found


def test_stubs_lie_beside_the_module_and_py_typed() -> None:
    assert STUB.is_file()
    assert (Path(apex.__file__).parent / "py.typed").is_file()


def test_stubs_name_everything_that_the_module_has() -> None:
    stub = members(ast.parse(STUB.read_text()))
    public = [name for name in dir(_core) if not name.startswith("_")]
    assert {"Reducer", "ModuleWatch"} <= set(public)
    assert sorted(stub) == sorted(public)
    for name in public:
        value = getattr(_core, name)
        if isinstance(value, type):
            described = stub[name]
            assert isinstance(described, ast.ClassDef), name
            methods = {method for method in vars(value) if not method.startswith("_")}
            assert methods <= set(members(described)), name


def test_stubs_know_the_types_of_tensors_and_of_arguments() -> None:
    function = members(ast.parse(STUB.read_text()))["all_reduce"]
    assert ast.unparse(function).startswith("def all_reduce(tensor: torch.Tensor, group: str")


def mypy(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("there is no mypy here")
    command = [sys.executable, "-m", "mypy", "--no-error-summary", f"--cache-dir={folder}/cache"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True)


def test_stubs_type_checked_find_a_wrong_call(tmp_path: Path) -> None:
    (tmp_path / "_core.pyi").write_text(STUB.read_text())
    good = tmp_path / "good.py"
    good.write_text("import _core\nchanged: bool = _core.ModuleWatch([{}]).changed()\n")
    bad = tmp_path / "bad.py"
    bad.write_text("import _core\nwatch = _core.ModuleWatch(3)\n")
    fine = mypy(tmp_path, "--follow-imports=skip", "_core.pyi", "good.py")
    assert fine.returncode == 0, fine.stdout + fine.stderr
    wrong = mypy(tmp_path, "--follow-imports=skip", "bad.py")
    assert wrong.returncode == 1
    assert 'bad.py:2: error: Argument 1 to "ModuleWatch"' in wrong.stdout


@pytest.mark.slow
def test_stubs_python_package_uses_only_what_the_module_has(tmp_path: Path) -> None:
    others = shutil.ignore_patterns("*.so*", "include", "lib", "__pycache__")
    shutil.copytree(Path(apex.__file__).parent, tmp_path / "apex", ignore=others)
    shutil.copy(STUB, tmp_path / "apex")
    shutil.copy(Path(_build_info.__file__), tmp_path / "apex")
    checked = mypy(tmp_path, "--ignore-missing-imports", "--no-site-packages", "-p", "apex")
    assert "Traceback" not in checked.stderr and checked.returncode in (0, 1), checked.stderr
    kinds = ("[attr-defined]", "[call-arg]")
    assert [line for line in checked.stdout.splitlines() if line.endswith(kinds)] == []
