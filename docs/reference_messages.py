# SPDX-License-Identifier: BSD-3-Clause
"""Lists all messages of errors and warnings in the sources. conf.py inserts the list into
messages.md.

For a message that is composed at run time, the parts in the source are shown, with "…" for the
rest.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GAP = "…"
CPP_KINDS = {
    "InvalidArgument": "ValueError",
    "Error": "RuntimeError",
    "RankMismatch": "RuntimeError",
    "CommunicationError": "RuntimeError",
    "NonFiniteGradient": "RuntimeError",
    "Interrupted": "RuntimeError",
}


class Message(NamedTuple):
    text: str
    kind: str
    file: str  #: relative to the repository


def all_messages() -> list[Message]:
    """Every message, without repetitions, ordered by source file."""
    found: dict[tuple[str, str], Message] = {}
    for path in sorted((ROOT / "python/apex").rglob("*.py")):
        for message in _of_python(path):
            found.setdefault(message[:2], message)
    for folder in ("cpp/src", "cpp/include/apex", "python/src"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix in (".cpp", ".h", ".cu", ".cuh"):
                for message in _of_cpp(path):
                    found.setdefault(message[:2], message)
    return list(found.values())


# --- Python ---


def _of_python(path: Path) -> list[Message]:
    tree = ast.parse(path.read_text())
    file = str(path.relative_to(ROOT))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind, text = ast.unparse(node.exc.func).rpartition(".")[2], _text(node.exc.args[0])
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("warnings.warn", "warn")
            and node.args
        ):
            category = node.args[1] if len(node.args) > 1 else None
            kind = ast.unparse(category) if category is not None else "UserWarning"
            text = _text(node.args[0])
        else:
            continue
        if _tells(text):
            found.append(Message(_tidy(text), kind, file))
    return found


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text(part) if isinstance(part, ast.Constant) else GAP for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return _text(node.body)
    return GAP


# --- C++ ---

LITERAL = r'"(?:[^"\\]|\\.)*"'
THROW = re.compile(
    rf"\bthrow ({'|'.join(CPP_KINDS)})\(|\bTORCH_CHECK_(VALUE|TYPE)\(|\bTORCH_WARN\w*\("
)


def _of_cpp(path: Path) -> list[Message]:
    source = re.sub(r"^\s*//.*$", "", path.read_text(), flags=re.M)
    file = str(path.relative_to(ROOT))
    found = []
    for match in THROW.finditer(source):
        inside = _balanced(source, match.end())
        if match[1]:
            kind = f"{CPP_KINDS[match[1]]} (`{match[1]}`)"
        else:
            kind = {"VALUE": "ValueError", "TYPE": "TypeError"}.get(match[2] or "", "UserWarning")
            if match[2]:
                inside = _after_comma(inside)  # after the condition
        text = _literals(inside)
        if _tells(text):
            found.append(Message(_tidy(text), kind, file))
    return found


def _balanced(source: str, start: int) -> str:
    depth, at = 1, start
    while depth and at < len(source):
        if literal := re.compile(LITERAL).match(source, at):
            at = literal.end()
            continue
        depth += (source[at] == "(") - (source[at] == ")")
        at += 1
    return source[start : at - 1]


def _after_comma(text: str) -> str:
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            return text[at + 1 :]
    return ""


def _literals(text: str) -> str:
    """The literals at the top level of an expression, joined by "…" for other operands."""
    pieces, depth, at, other = [], 0, 0, ""
    while at < len(text):
        literal = re.compile(LITERAL).match(text, at)
        if literal and depth == 0:
            if re.search(r"\w", other):
                pieces.append(GAP)
            pieces.append(literal[0][1:-1].replace('\\"', '"').replace("\\n", " "))
            other, at = "", literal.end()
            continue
        if literal:
            at = literal.end()
            other += "x"
            continue
        depth += (text[at] in "({[") - (text[at] in ")}]")
        other += text[at]
        at += 1
    if re.search(r"\w", other):
        pieces.append(GAP)
    return "".join(pieces)


# --- Markdown ---


def _tells(text: str) -> bool:
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= 3


def _tidy(text: str) -> str:
    return re.sub(rf"{GAP}(\s*{GAP})+", GAP, " ".join(text.split()))


def reference() -> str:
    """A table for each part of the package."""
    titles = {
        "python/apex/parallel": "`apex.parallel`",
        "python/apex/amp": "`apex.amp`",
        "python/apex/fp16_utils": "`apex.fp16_utils`",
        "python/apex/optimizers": "`apex.optimizers`",
        "python/apex": "The rest of the Python package",
        "cpp/src/batch_norm": "Batch norm, in C++",
        "cpp/src/distributed": "Process groups, in C++",
        "cpp/src/optim": "Optimizers, in C++",
        "cpp/src/amp": "Loss scaler and autocast, in C++",
        "cpp/src": "The reducer and its messages, in C++",
        "": "The binding",
    }
    parts: dict[str, list[Message]] = {title: [] for title in titles.values()}
    for message in all_messages():
        folder = next(folder for folder in titles if message.file.startswith(folder))
        parts[titles[folder]].append(message)
    lines = []
    for title, messages in parts.items():
        if not messages:
            continue
        lines += [f"## {title}", "", "| text | kind | source |", "|---|---|---|"]
        for text, kind, file in messages:
            shown = re.sub(r"([\\`*_|<\[\]])", r"\\\1", text)
            lines.append(f"| {shown} | {kind} | `{file}` |")
        lines.append("")
    return "\n".join(lines)
