# SPDX-License-Identifier: BSD-3-Clause
"""C++ mutants: found in tree-sitter's syntax tree, all compiled in, each selected by its number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tree_sitter
import tree_sitter_cpp

from .model import Mutant

FLIPPED = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
BOUND = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
SWAPPED = {"+": "-", "-": "+", "&&": "||", "||": "&&"}

#: Node types that are not mutated: compile-time constants and the text of errors.
LEFT_OUT = {
    "array_declarator", "attribute_declaration", "case_statement_value", "concatenated_string",
    "enum_specifier", "noexcept", "optional_parameter_declaration", "requires_clause",
    "static_assert_declaration", "template_argument_list", "template_parameter_list",
    "throw_statement", "ERROR",
}  # fmt: skip

#: Calls that change no result: preallocation, warnings, and pauses while polling.
NO_EFFECT = (
    "reserve", "shrink_to_fit", "prefetch", "sleep_for", "TORCH_WARN", "__builtin_prefetch",
)  # fmt: skip

_parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_cpp.language()))


def _left_out(node: tree_sitter.Node) -> bool:
    parent = node.parent
    if node.type in LEFT_OUT or node.type.startswith("preproc_") and node.type != "preproc_if":
        return True
    if parent is None:
        return False
    if parent.type == "case_statement" and node == parent.child_by_field_name("value"):
        return True
    if parent.type == "if_statement" and node.type == "condition_clause":
        return any(child.type == "constexpr" for child in parent.children)
    if parent.type == "argument_list" and parent.parent.type == "call_expression":
        # In a check, the arguments after the condition are its message.
        called = parent.parent.child_by_field_name("function").text
        return called.startswith(b"TORCH_CHECK") and node != parent.named_children[0]
    if node.type in ("declaration", "field_declaration"):
        return any(c.type == "type_qualifier" and c.text == b"constexpr" for c in node.children)
    return False


def _is_text(node: tree_sitter.Node) -> bool:
    """True for `+` that joins strings."""
    while node.parent is not None and node.parent.type == "binary_expression":
        node = node.parent
    return b'"' in node.text or b"to_string" in node.text


def _returns_constant(node: tree_sitter.Node) -> bool:
    """Whether `return {}` compiles and is not text: not in a lambda without an explicit type."""
    while node is not None and node.type not in ("function_definition", "lambda_expression"):
        node = node.parent
    if node is None:
        return False
    if node.type == "lambda_expression":
        declarator = node.child_by_field_name("declarator")
        text = declarator.text if declarator is not None else b""
        return b"->" in text and not text.endswith(b"&")
    kind = node.child_by_field_name("type")
    return kind is not None and b"string" not in kind.text and not kind.text.endswith(b"&")


def _expressions(node: tree_sitter.Node) -> Iterator[tuple[str, str, bool]]:
    """Operator, replacement of the node, and whether the node is a statement."""
    text = node.text.decode()
    if node.type == "binary_expression":
        left, right = (node.child_by_field_name(side).text.decode() for side in ("left", "right"))
        sign = node.child_by_field_name("operator").type
        if sign in FLIPPED:
            yield "comparison flipped", f"({left}) {FLIPPED[sign]} ({right})", False
        if sign in BOUND:
            yield "bound off by one", f"({left}) {BOUND[sign]} ({right})", False
        if sign in SWAPPED and not _is_text(node):
            name = "and, or swapped" if sign in ("&&", "||") else "plus, minus swapped"
            yield name, f"({left}) {SWAPPED[sign]} ({right})", False
        if sign in ("*", "/"):
            yield "scale left out", left, False
    elif node.type in ("true", "false"):
        yield "constant flipped", "false" if node.type == "true" else "true", False
    elif node.type == "number_literal" and text == "0":
        declared = node.parent if node.parent.type == "init_declarator" else None
        if declared is not None and declared.parent.parent.type == "for_statement":
            yield "bound off by one", "1", False
    elif node.type == "call_expression" and node.parent.type != "expression_statement":
        function = node.child_by_field_name("function")
        if function.type == "field_expression" and function.child_by_field_name("field").text in (
            b"mul", b"div", b"mul_", b"div_",
        ):  # fmt: skip
            yield "scale left out", function.child_by_field_name("argument").text.decode(), False
    elif node.type == "expression_statement" and node.named_children:
        inner = node.named_children[0]
        if inner.type == "call_expression":
            called = inner.child_by_field_name("function").text.decode()
            if not any(word in called for word in NO_EFFECT):
                yield "call dropped", "", True
        elif inner.type == "update_expression":
            yield "increment dropped", "", True
        elif inner.type == "assignment_expression":
            sign = inner.child_by_field_name("operator").type
            scales = sign in ("*=", "/=")
            yield "scale left out" if scales else "assignment dropped", "", True
    elif node.type == "return_statement" and node.named_children:
        value = node.named_children[0]
        plain = value.type in ("true", "false", "null", "initializer_list", "number_literal")
        if not plain and _returns_constant(node):
            yield "constant returned", "return {};", True

    parent = node.parent
    if (
        parent is not None
        and parent.type == "condition_clause"
        and parent.parent.type == "if_statement"
        and node == parent.child_by_field_name("value")
        and node.type not in ("declaration", "init_statement")
    ):
        sign = node.child_by_field_name("operator")
        if sign is None or sign.type not in FLIPPED:  # otherwise it is flipped already
            yield "condition negated", f"!({text})", False


def find(root: Path, path: str) -> list[Mutant]:
    """All mutants of a file."""
    source = (root / path).read_bytes()
    lines = source.decode().splitlines()
    found: list[Mutant] = []

    def walk(node: tree_sitter.Node) -> None:
        if _left_out(node):
            return
        text = node.text
        if b"//" not in text and b"#" not in text and len(text) < 1000:
            for operator, replacement, statement in _expressions(node):
                line = node.start_point[0]
                after = " ".join(replacement.split()) or "nothing"
                found.append(
                    Mutant(
                        path=path,
                        line=line + 1,
                        last_line=node.end_point[0] + 1,
                        text=lines[line].strip(),
                        operator=operator,
                        change=f"{' '.join(text.decode().split())} -> {after}",
                        begin=node.start_byte,
                        end=node.end_byte,
                        replacement=" ".join(replacement.split()),
                        statement=statement,
                    )
                )
        for child in node.children:
            walk(child)

    walk(_parser.parse(source).root_node)
    return found


def _switched(mutant: Mutant, original: str) -> str:
    on = f"apex_mutant::on({mutant.number})"
    if not mutant.statement:
        cast = "static_cast<bool>" if mutant.operator == "condition negated" else ""
        return f"({on} ? ({mutant.replacement}) : {cast}({original}))"
    if mutant.replacement:
        return f"{{ if ({on}) {mutant.replacement} {original} }}"
    return f"{{ if (!{on}) {{ {original} }} }}"


def rewrite(source: str, mutants: list[Mutant], name: str, header: Path) -> str:
    """The source with all of its mutants. Lines keep their numbers.

    If mutants are nested, the inner one is in the outer one's unmodified branch, because only one
    is active at a time.
    """
    data = source.encode()
    order = sorted(mutants, key=lambda m: (m.begin, -m.end))

    def render(begin: int, end: int, inside: list[Mutant]) -> str:
        parts: list[str] = []
        at = begin
        while inside:
            outer = inside[0]
            same = [m for m in inside if (m.begin, m.end) == (outer.begin, outer.end)]
            within = [m for m in inside if m not in same and m.end <= outer.end]
            text = render(outer.begin, outer.end, within)
            for mutant in same:
                text = _switched(mutant, text)
            parts += [data[at : outer.begin].decode(), text]
            at = outer.end
            inside = [m for m in inside if m.begin >= outer.end]
        return "".join(parts) + data[at:end].decode()

    body = render(0, len(data), order)
    return f'#include "{header}"\n#line 1 "{name}"\n{body}'
