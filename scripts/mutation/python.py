# SPDX-License-Identifier: BSD-3-Clause
"""Python mutants: found and selected in the syntax tree of `ast`."""

from __future__ import annotations

import ast
from pathlib import Path

from .model import Mutant

FLIPPED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE,
    ast.LtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
BOUND = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}

#: Calls that change no result, by the last part of their name.
NO_EFFECT = ("warn", "warning", "print", "maybe_print", "warn_or_err")


class _Rewriter(ast.NodeTransformer):
    """Finds the mutants of a module, and inserts both versions of each mutant with a number."""

    def __init__(self, path: str, source: str, numbers: dict[tuple, int] | None) -> None:
        self.path, self.lines, self.numbers = path, source.splitlines(), numbers
        self.found: list[Mutant] = []
        self.functions = 0

    # Not mutated: the text of errors, annotations, decorators, defaults, and code that runs when a
    # module or class is created.
    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.functions += 1
        body = node.body
        documented = ast.get_docstring(node) is not None
        node.body = body[:1] * documented + self._visit_all(body[documented:])
        self.functions -= 1
        return node

    def _visit_all(self, body: list[ast.stmt]) -> list[ast.stmt]:
        return [self.visit(statement) for statement in body]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def _mutants(self, node: ast.AST, original: str) -> list[tuple[str, ast.AST | None]]:
        """Operators, and the node that each makes of `node`; None if it removes the node."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            kind = type(node.ops[0])
            return [
                (name, ast.Compare(node.left, [table[kind]()], node.comparators))
                for name, table in (("comparison flipped", FLIPPED), ("bound off by one", BOUND))
                if kind in table
            ]
        if isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            return [("and, or swapped", ast.BoolOp(other, node.values))]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return [("condition negated", node.operand)]
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, (ast.Mult, ast.Div)):
                return [("scale left out", node.left)]
            if isinstance(node.op, (ast.Add, ast.Sub)) and "'" not in original:
                other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
                return [("plus, minus swapped", ast.BinOp(node.left, other, node.right))]
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            return [("constant flipped", ast.Constant(not node.value))]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func).rpartition(".")[2]
            return [] if called in NO_EFFECT else [("call dropped", None)]
        if isinstance(node, ast.AugAssign):
            scales = isinstance(node.op, (ast.Mult, ast.Div))
            return [("scale left out" if scales else "assignment dropped", None)]
        if isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple)):
            return [("assignment dropped", None)]
        if isinstance(node, ast.Return) and node.value is not None:
            if not isinstance(node.value, ast.Constant):
                return [("constant returned", ast.Return(ast.Constant(None)))]
        return []

    def visit(self, node: ast.AST) -> ast.AST:
        if not self.functions or not hasattr(node, "lineno"):
            return super().visit(node)
        original = ast.unparse(node)
        made = self._mutants(node, original)
        if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(
            node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)
        ):
            # Counted as a mutant of the test, which has its own position.
            node.test = self._place(
                node.test,
                ast.unparse(node.test),
                [("condition negated", ast.UnaryOp(ast.Not(), node.test))],
                super().visit(node.test),
            )
            for part in ("body", "orelse"):
                inner = getattr(node, part)
                visited = self._visit_all(inner) if isinstance(inner, list) else self.visit(inner)
                setattr(node, part, visited)
            return node
        # The mutated version contains the original node. Mutants inside it are in the other
        # version.
        kept = [(name, new and ast.parse(ast.unparse(new)).body[0]) for name, new in made]
        return self._place(node, original, kept, super().visit(node))

    def _place(self, node: ast.AST, original: str, made: list, visited: ast.AST) -> ast.AST:
        for operator, new in made:
            after = ast.unparse(new) if new is not None else "nothing"
            mutant = Mutant(
                path=self.path,
                line=node.lineno,
                last_line=node.end_lineno or node.lineno,
                text=self.lines[node.lineno - 1].strip(),
                operator=operator,
                change=f"{original} -> {after}",
                begin=node.lineno * 1000 + node.col_offset,
            )
            self.found.append(mutant)
            number = (self.numbers or {}).get((mutant.line, mutant.begin, mutant.change))
            if number is None:
                continue
            on = ast.Call(ast.Name("__apex_mutant_on__"), [ast.Constant(number)], [])
            if not isinstance(visited, ast.stmt):
                value = new.value if isinstance(new, ast.Expr) else new
                visited = ast.IfExp(on, value, visited)
            elif new is None:
                visited = ast.If(ast.UnaryOp(ast.Not(), on), [visited], [])
            else:
                visited = ast.If(on, [new], [visited])
        return visited


def find(root: Path, path: str) -> list[Mutant]:
    """All mutants of a module."""
    source = (root / path).read_text()
    rewriter = _Rewriter(path, source, None)
    rewriter.visit(ast.parse(source))
    return rewriter.found


def rewrite(source: str, mutants: list[Mutant]) -> str:
    """The module with all of its mutants."""
    numbers = {(m.line, m.begin, m.change): m.number for m in mutants}
    tree = _Rewriter("", source, numbers).visit(ast.parse(source))
    place = 1 if ast.get_docstring(tree) is not None else 0
    while isinstance(tree.body[place], ast.ImportFrom) and tree.body[place].module == "__future__":
        place += 1
    tree.body[place:place] = ast.parse("from apex_mutant import on as __apex_mutant_on__").body
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
