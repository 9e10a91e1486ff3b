# SPDX-License-Identifier: BSD-3-Clause
"""The messages of errors and warnings, from the sources: conf.py fills errors.md with them.

errors.md has a row for a message whose cause or remedy needs more than the message itself says. Its
first cell is a part of the text. On the site the whole text takes its place, and the messages that
have no row follow. Of a message that is put together at run time, the parts that are written in the
source are shown, with "…" for the rest.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
#: What a function returns or assigns may be a message or a part of one: from so many words on.
WORDS = 6
#: The header of the tables of errors.md that are filled.
HEADER = "| part of the message | kind | more about cause and remedy |"
FILLED = "| message | kind | more about cause and remedy |"


class Message(NamedTuple):
    text: str
    kind: str  #: "" for a part that is put into an error elsewhere
    file: str  #: below the repository


def all_messages() -> list[Message]:
    """Every message, without repetitions, ordered by where it comes from."""
    found: dict[str, Message] = {}
    for path in sorted((ROOT / "python/apex").rglob("*.py")):
        for message in _of_python(path):
            found.setdefault(message.text, message)
    for folder in ("cpp/src", "cpp/include/apex", "python/src"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix in (".cpp", ".h", ".cu", ".cuh"):
                for message in _of_cpp(path):
                    found.setdefault(message.text, message)
    return list(found.values())


# --- Python ---


def _of_python(path: Path) -> list[Message]:
    tree = ast.parse(path.read_text())
    file = str(path.relative_to(ROOT))
    found, seen = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind, value = ast.unparse(node.exc.func).rpartition(".")[2], node.exc.args[0]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("warnings.warn", "warn")
            and node.args
        ):
            category = node.args[1] if len(node.args) > 1 else None
            kind = ast.unparse(category) if category is not None else "UserWarning"
            value = node.args[0]
        else:
            continue
        seen |= {id(part) for part in ast.walk(value)}
        if _tells(text := _text(value)):
            found.append(Message(_tidy(text), kind, file))
    if file.startswith(REPORTS):
        return found
    for node in ast.walk(tree):
        if isinstance(node, (ast.Return, ast.Assign)) and node.value and id(node.value) not in seen:
            text = _text(node.value)
            if _tells(text, WORDS) and not NAMES.match(text):
                found.append(Message(_tidy(text), "", file))
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
    rf"\bthrow ({'|'.join(CPP_KINDS)})\(|\bTORCH_CHECK(?:_(VALUE|TYPE|NOT_IMPLEMENTED))?\("
    r"|\bTORCH_WARN\w*\(|\b(require|refuse)\(|\bpass_\.(fail)\("
)
CHECKS = {
    "": "RuntimeError",
    "VALUE": "ValueError",
    "TYPE": "TypeError",
    "NOT_IMPLEMENTED": "NotImplementedError",
}
#: Literals that are no messages: names of collectives and operators, and what is printed or logged.
OTHERS = re.compile(
    r"^(const std::string what\b|static_assert|stream <<|m\.|nb::|return guarded|broadcast_"
    r"|static const|constexpr const char\* k(Forward|Backward|Inference|AllReduce|What)\b"
    r"|std::(printf|fprintf|cerr)|notify\(|[\",/])"
)
#: Reports, not errors: docs/troubleshooting.md and docs/distributed_data_parallel.md show them.
REPORTS = (
    "cpp/src/watch/stall",
    "cpp/src/step/step_times",
    "cpp/src/reducer/overlap_report",
    "python/apex/doctor",
    "python/apex/demo",
)
#: What begins like this names a collective, a variable or a file.
NAMES = re.compile(
    r"(all-|broadcast of|exchange|handshake|connect to|/proc|bucket size|eps…|pip install|torch\."
    r"|_ddp|The package)"
)


def _of_cpp(path: Path) -> list[Message]:
    source = without_comments(path.read_text())
    file = str(path.relative_to(ROOT))
    found = []
    for match in THROW.finditer(source):
        inside = _balanced(source, match.end())
        if match[1]:
            kind = f"{CPP_KINDS[match[1]]} (`{match[1]}`)"
        elif match[3]:
            kind = _kind_of(match[3], source)
            inside = _after_comma(inside)
        elif match[4]:
            kind = "RuntimeError (`Error`)"
        elif "WARN" in match[0]:
            kind = "UserWarning"
        else:
            kind = CHECKS[match[2] or ""]
            inside = _after_comma(inside)  # behind the condition
        text = _literals(inside)
        if _tells(text):
            found.append(Message(_tidy(text), kind, file))
    if path.suffix != ".cpp" or file.startswith(("python/src", *REPORTS)):
        return found
    for statement, rest in _statements(source):
        if THROW.search(statement) or OTHERS.search(statement):
            continue
        text = _literals(statement, deep=True)
        if _tells(text, WORDS) and not NAMES.match(text):
            thrown = re.match(r"[^;]*;?\s*throw (\w+)\(out\.str\(\)", rest)
            name = thrown[1] if thrown else ""
            kind = f"{CPP_KINDS[name]} (`{name}`)" if name in CPP_KINDS else ""
            found.append(Message(_tidy(text), kind, file))
    return found


def without_comments(source: str) -> str:
    """Also without lines of the preprocessor."""
    kept = re.sub(
        rf"({LITERAL})|//[^\n]*|/\*.*?\*/",
        lambda match: match[1] or " ",
        source,
        flags=re.S,
    )
    return re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*$", "", kept, flags=re.M)


def _kind_of(function: str, source: str) -> str:
    """What a function of this file throws."""
    thrown = re.search(rf"void {function}\([^{{]*\{{[^}}]*?throw (\w+)\(", source)
    return f"{CPP_KINDS[thrown[1]]} (`{thrown[1]}`)" if thrown and thrown[1] in CPP_KINDS else ""


def _statements(source: str) -> Iterator[tuple[str, str]]:
    """What is between semicolons and braces, and what follows it."""
    start, at = 0, 0
    while at < len(source):
        if literal := re.compile(LITERAL).match(source, at):
            at = literal.end()
            continue
        if source[at] in ";{}":
            yield source[start:at].strip(), source[at : at + 80]
            start = at + 1
        at += 1


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


def _literals(text: str, deep: bool = False) -> str:
    """The literals of an expression, joined; "…" for what is between them.

    Those at its top level alone, unless deep.
    """
    pieces, depth, at, other = [], 0, 0, ""
    while at < len(text):
        literal = re.compile(LITERAL).match(text, at)
        if literal and (deep or depth == 0):
            if re.search(r"[\w,:?]", other) and not (deep and not pieces):
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


def _tells(text: str, words: int = 3) -> bool:
    return len(re.findall(r"[A-Za-z]{2,}", text)) >= words


def _tidy(text: str) -> str:
    return re.sub(rf"{GAP}(\s*{GAP})+", GAP, " ".join(text.split()))


# --- Markdown ---


def plain(text: str) -> str:
    """Without punctuation that differs between a source and a page."""
    return re.sub(r"[\s…\\*'\"`]+", " ", text).strip(" ,.=[]").lower()


def matches(part: str, messages: list[Message]) -> list[Message]:
    """The messages that contain a part of a text, in which each "…" stands for any text."""
    wanted = re.compile(".*".join(re.escape(plain(piece)) for piece in part.split(GAP)))
    return [message for message in messages if wanted.search(plain(message.text))]


class Row(NamedTuple):
    parts: list[str]
    kind: str
    about: str


def rows(page: str) -> list[Row]:
    """Of the tables of errors.md that are filled."""
    found = []
    for table in re.findall(rf"^{re.escape(HEADER)}\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.M):
        for line in table.splitlines():
            parts, kind, about = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
            found.append(Row(parts.split("<br>"), kind, about))
    return found


def fill(page: str) -> str:
    """errors.md with whole texts, and with the messages that have no row."""
    messages = all_messages()
    shown: set[str] = set()
    filled = page.replace(HEADER, FILLED)
    for row in rows(page):
        found = [message for part in row.parts for message in matches(part, messages)]
        if not found:
            raise ValueError(f"errors.md: no message has {row.parts}")
        shown |= {message.text for message in found}
        texts = "<br>".join(dict.fromkeys(_escaped(message.text) for message in found))
        old = f"| {'<br>'.join(row.parts)} | {row.kind} | {row.about} |"
        filled = filled.replace(old, f"| {texts} | {row.kind} | {row.about} |")
    rest = [message for message in messages if message.text not in shown]
    return filled.replace("<!-- generated: messages -->", _lists(rest))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_|<\[\]])", r"\\\1", text)


def _lists(messages: list[Message]) -> str:
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
        "": "Headers and the binding",
    }
    parts: dict[str, list[Message]] = {title: [] for title in titles.values()}
    for message in messages:
        folder = next(folder for folder in titles if message.file.startswith(folder))
        parts[titles[folder]].append(message)
    lines = []
    for title, listed in parts.items():
        if not listed:
            continue
        lines += [f"### {title}", "", "| message | kind | source |", "|---|---|---|"]
        for text, kind, file in listed:
            lines.append(f"| {_escaped(text)} | {kind or 'a part of an error'} | `{file}` |")
        lines.append("")
    return "\n".join(lines)
