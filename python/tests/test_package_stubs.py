# SPDX-License-Identifier: BSD-3-Clause
"""The stubs of apex._core exist, are complete, and pass a type checker."""

import ast
from pathlib import Path

from apex import _core

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
