# SPDX-License-Identifier: BSD-3-Clause
"""Parts of the package and of the C++ library use only parts below them, without cycles.

The graph is read from the sources. Imports within functions count like those at the top of a
module. Those under ``if TYPE_CHECKING`` do not run, so two modules may name each other's types.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

import amp_C
import apex
import apex_C

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT.parent / "cpp" / "src"
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
Graph = dict[str, set[str]]


def read(root: Path, types: bool) -> Graph:
    """By module of PACKAGES below `root`, the modules that it imports, with `types` also those
    that only type checkers import."""
    files: dict[str, Path] = {}
    for file in sorted(file for package in PACKAGES for file in root.glob(f"{package}/**/*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    modules = {*files, *BUILT}
    return {
        name: {target for target in _imports(name, file, modules, types) if target != name}
        for name, file in files.items()
    }


def _imports(name: str, file: Path, modules: set[str], types: bool) -> Iterator[str]:
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in _walk(ast.parse(file.read_text()), types):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            members = [f"{origin}.{alias.name}" for alias in node.names]
            targets = [member if member in modules else origin for member in members]
        for target in modules.intersection(targets):
            # The packages that contain it run first, except those that also contain the importer.
            parts = target.split(".")
            holders = [".".join(parts[: i + 1]) for i in range(len(parts))]
            yield from (h for h in holders if h == target or not f"{name}.".startswith(f"{h}."))


def _walk(node: ast.AST, types: bool) -> Iterator[ast.AST]:
    yield node
    typing = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for child in ast.iter_child_nodes(node):
        if types or not typing:
            yield from _walk(child, types)


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


def upward(graph: Graph) -> list[str]:
    """Imports of a package in the same or a higher layer."""
    return [
        f"{source} imports {target}"
        for source, targets in graph.items()
        for target in sorted(targets)
        if layer(target)[1] != layer(source)[1] and layer(target)[0] >= layer(source)[0]
    ]


def test_packages_import_downwards_and_modules_in_no_circle(tmp_path: Path) -> None:
    graph = read(ROOT, types=True)
    # Known imports: relative, through a package, in a function.
    assert "apex._internal.tree" in graph["apex.parallel._devices"]
    assert "apex._internal.dtypes" in graph["apex.amp.casting"]
    assert "apex._core" in graph["apex.cmake_dir"]
    assert upward(graph) == []
    graphlib.TopologicalSorter(read(ROOT, types=False)).prepare()  # raises CycleError


#: By folder of cpp/src: the folders and headers whose headers it may include. A header outside of
#: folders is below all parts.
BELOW = {
    "watch": ["distributed/backends.h"],
    "transport": ["watch/process_state.h", "distributed/backends.h"],
    "comm": ["transport", "watch", "distributed/backends.h"],
    "distributed": ["comm", "transport", "watch"],
}


def test_parts_in_cpp_include_only_parts_below_them() -> None:
    wrong, seen = [], 0
    for part, below in BELOW.items():
        for source in sorted((SOURCES / part).glob("*.[hc]*")):
            for header in re.findall(r'^#include "([^"]+)"', source.read_text(), re.M):
                folder, _, name = header.partition("/")
                if not name or folder == part:
                    continue
                seen += 1
                if folder not in below and header not in below:
                    wrong.append(f"{part}/{source.name}: {header}")
    assert not wrong, wrong
    assert seen > 20
    for header in SOURCES.glob("*.h"):
        assert not re.search(r'^#include "\w+/', header.read_text(), re.M), header.name


# --- a script's torch.set_default_device does not affect what the package creates ---

FACTORIES = {function.__name__ for function in _device_constructors()}


def _without_device(source: str) -> list[str]:
    """Calls of torch's functions that create a tensor on the default device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in FACTORIES
        and "device" not in {keyword.arg for keyword in call.keywords}
    ]


def test_every_tensor_of_the_package_names_its_device() -> None:
    found = {}
    for package in (apex, amp_C, apex_C):
        for path in Path(package.__file__).parent.rglob("*.py"):
            text = path.read_text()
            # A name without its module would not be detected.
            assert "from torch import *" not in text
            imported = [
                alias.name
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ImportFrom) and node.module == "torch"
                for alias in node.names
            ]
            assert not FACTORIES.intersection(imported), path
            if calls := _without_device(text):
                found[str(path)] = calls
    assert not found
    assert _without_device("x = torch.zeros(3)") and not _without_device("x = torch.zeros_like(y)")
