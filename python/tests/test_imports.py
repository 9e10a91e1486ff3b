# SPDX-License-Identifier: BSD-3-Clause
"""Modules of the package import only lower layers, without cycles.

The graph is read from the sources. Imports within functions count like those at the top of a
module, and so does the name of a module in a string, as in ``sys.modules.get("apex.amp")``. Imports
under ``if TYPE_CHECKING`` do not run, so two modules may name each other's types. But no package
names types of a package above it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("apex", "amp_C", "apex_C")
#: Created by the build. They import nothing of the package.
BUILT = ("apex._core", "apex._build_info")
#: From the bottom up. A package may import packages of earlier lines, and itself.
LAYERS = (
    BUILT,
    ("apex._internal", "apex._check", "apex._host_backend"),
    ("apex.multi_tensor_apply", "apex.normalization", "apex.optimizers", "apex.parallel"),
    ("apex.contrib", "apex.amp"),
    ("apex.fp16_utils",),
    ("apex", "apex.cmake_dir"),
    ("amp_C", "apex_C", "apex.__main__", "apex.demo"),
    ("apex.doctor",),
)


class Import(NamedTuple):
    source: str
    target: str
    line: int
    runs: bool  # False: for type checkers only

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def read(root: Path) -> list[Import]:
    """All imports of modules of PACKAGES, below `root`, by other modules."""
    files: dict[str, Path] = {}
    for file in sorted(file for package in PACKAGES for file in root.glob(f"{package}/**/*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    modules = {*files, *BUILT}
    return [
        found
        for name, file in files.items()
        for found in _imports(name, file, modules)
        if found.target != name
    ]


def _imports(name: str, file: Path, modules: set[str]) -> Iterator[Import]:
    tree = ast.parse(file.read_text())
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node, runs in _walk(tree, True):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            members = [f"{origin}.{alias.name}" for alias in node.names]
            targets = [member if member in modules else origin for member in members]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            targets = [node.value]
        for target in targets:
            if target in modules:
                # The packages that contain it run first, except those that also contain the
                # importer.
                for holder in _holders(target):
                    if holder == target or not f"{name}.".startswith(f"{holder}."):
                        yield Import(name, holder, node.lineno, runs)


def _holders(module: str) -> Iterator[str]:
    parts = module.split(".")
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def _walk(node: ast.AST, runs: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, runs
    typing = isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, runs and not (typing and field == "body"))


def circles(imports: list[Import]) -> list[list[str]]:
    """One cycle through each module that is the first of its cycle to be visited."""
    targets: dict[str, list[str]] = {}
    for found in imports:
        if found.runs:
            targets.setdefault(found.source, []).append(found.target)
    result: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            result.append([*path[path.index(module) :], module])
        elif module not in done:
            for target in targets.get(module, ()):
                visit(target, [*path, module])
            done.add(module)

    for module in targets:
        visit(module, [])
    return result


def layer(module: str) -> tuple[int, str]:
    """The line in LAYERS of its package, and the package: the longest matching name."""
    fits = [
        (len(package), line, package)
        for line, packages in enumerate(LAYERS)
        for package in packages
        # Apart from its packages, "apex" has only the modules in LAYERS.
        if module == package or (package != "apex" and module.startswith(f"{package}."))
    ]
    assert fits, f"{module} is in no line of LAYERS"
    return max(fits)[1:]


def upward(imports: list[Import]) -> list[str]:
    """Imports of a package in the same or a higher layer."""
    result = []
    for found in imports:
        (own, package), (other, target) = layer(found.source), layer(found.target)
        if target != package and other >= own:
            result.append(str(found))
    return result


def test_modules_import_no_circle() -> None:
    imports = read(ROOT)
    # The graph contains known imports of the sources: through a package, relative, in a function.
    edges = {(found.source, found.target) for found in imports}
    assert ("apex.parallel._devices", "apex._internal.tree") in edges
    assert ("apex.amp.casting", "apex._internal.dtypes") in edges
    assert ("apex.cmake_dir", "apex._core") in edges
    assert circles(imports) == []


def test_packages_import_downwards() -> None:
    assert upward(read(ROOT)) == []


def _private_names(files: list[Path]) -> set[str]:
    """Attributes and imports with a leading underscore that no source of the package defines."""
    own, used = set[str](), set[str]()
    for file in (ROOT / "apex").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
        own.add(file.stem)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            used.update(name for name in names if re.match("_[^_]", name))
    return used - own


def test_private_names_of_torch_are_listed() -> None:
    folders = ("apex", "apex/parallel", "apex/_internal")
    files = [file for folder in folders for file in (ROOT / folder).glob("*.py")]
    of_python = {"_exit", "_make", "_replace", "_option_string_actions"}
    page = (ROOT.parent / "docs" / "compatibility.md").read_text()
    table = page.partition("private names of torch")[2].partition("\n\n## ")[0]
    assert [n for n in _private_names(files) - of_python - {"_C"} if n not in table] == []
    listed = set(re.findall(r"\b_[a-z]\w+", table)) - {"_internal"}
    text = "".join(file.read_text() for file in files)
    assert [name for name in listed if name not in text] == []


def test_tests_import_no_test_and_define_helpers_once() -> None:
    defined: list[str] = []
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            helper = isinstance(node, ast.FunctionDef) and node.name in ("run_ranks", "free_port")
            if helper and file.parent.name == "tests":  # the programs in faults/ run without it
                defined.append(f"{node.name} in {file.name}")
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names]
                origin = node.module if isinstance(node, ast.ImportFrom) else None
                tests = [name for name in (origin, *names) if name and name.startswith("test_")]
                assert tests == [], f"{file.name}:{node.lineno}"
    assert sorted(defined) == ["free_port in ddp_support.py", "run_ranks in ddp_support.py"]


def _tree(root: Path, sources: dict[str, str]) -> Path:
    for name, text in sources.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    "text",
    [
        "import apex.amp.b",
        "from apex.amp import b",
        "from apex.amp.b import something",
        "from . import b",
        "from .b import something",
        "def f():\n    from .b import something",
        "class A:\n    def f(self):\n        import apex.amp.b as other",
        "import sys\nb = sys.modules.get('apex.amp.b')",
        "import importlib\nb = importlib.import_module('apex.amp.b')",
    ],
)
def test_circle_is_found_however_it_is_written(tmp_path: Path, text: str) -> None:
    sources = {
        "apex/amp/__init__.py": "",
        "apex/amp/a.py": text,
        "apex/amp/b.py": "from . import a",
    }
    assert circles(read(_tree(tmp_path, sources))) == [["apex.amp.a", "apex.amp.b", "apex.amp.a"]]


def test_circle_of_types_is_none_but_leads_upwards(tmp_path: Path) -> None:
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import apex.amp.b\n"
    sources = {"apex/parallel/a.py": types, "apex/amp/b.py": "import apex.parallel.a"}
    imports = read(_tree(tmp_path, sources))
    assert circles(imports) == []
    assert "apex.parallel.a:3 imports apex.amp.b" in upward(imports)


def test_circle_through_a_package_is_found(tmp_path: Path) -> None:
    sources = {
        "apex/parallel/__init__.py": "from . import a",
        "apex/parallel/a.py": "from apex.amp import b",
        "apex/amp/__init__.py": "",
        "apex/amp/b.py": "from apex.parallel import c",
        "apex/parallel/c.py": "",
    }
    imports = read(_tree(tmp_path, sources))
    assert circles(imports) == [["apex.amp.b", "apex.parallel", "apex.parallel.a", "apex.amp.b"]]
    assert upward(imports) == [
        "apex.parallel.a:1 imports apex.amp",
        "apex.parallel.a:1 imports apex.amp.b",
    ]
