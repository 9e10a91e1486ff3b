# SPDX-License-Identifier: BSD-3-Clause
"""Generates the C++ reference: Markdown from the public headers, cpp/include/apex.

It parses only the C++ in these headers: namespaces, types, functions, `///` before the documented
declaration and `///<` after it. conf.py inserts the result into cpp_api.md. A test checks that it
has every name that a header declares (python/tests/test_docs_reference.py).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

INCLUDE = Path(__file__).resolve().parents[1] / "cpp" / "include"
OPENERS, CLOSERS = "({[", ")}]"


@dataclass
class Entry:
    """A declaration: its text in one line, what kind it is, its documentation and members."""

    kind: str  #: "type", "function", "value", or "doc" for text that belongs to no declaration
    name: str
    text: str
    doc: list[str] = field(default_factory=list)
    members: list[Entry] = field(default_factory=list)
    namespace: str = ""


def read_header(path: Path) -> list[Entry]:
    """The declarations of a header, in order, without namespaces `detail` and private members."""
    return list(_entries(_Source(path.read_text()), "", public=True))


class _Source:
    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.at = 0

    def peek(self) -> str | None:
        return self.lines[self.at].strip() if self.at < len(self.lines) else None

    def next(self) -> str:
        self.at += 1
        return self.lines[self.at - 1]


def _entries(
    source: _Source, namespace: str, public: bool, members: bool = False
) -> Iterator[Entry]:
    doc: list[str] = []
    while (line := source.peek()) is not None:
        if line.startswith("///"):
            doc.append(source.next().strip()[3:].removeprefix(" "))
        elif not line or line == "//" or line.startswith("// "):
            source.next()
            # A separate comment, which does not belong to the next declaration.
            if not line and doc and not members:
                yield Entry("doc", "", "", doc)
                doc = []
        elif line.startswith("#"):
            macro = re.match(r"#define (\w+[A-Z])\b(?!\()", line)
            while source.next().endswith("\\"):
                pass
            if macro:
                yield Entry("value", macro[1], f"#define {macro[1]}", doc)
                doc = []
        elif line.startswith("}"):
            source.next()
            return
        elif match := re.match(r"(public|private|protected):$", line):
            source.next()
            public = match[1] == "public"
        elif match := re.match(r"namespace ([\w:]+) \{", line):
            source.next()
            inner = "::".join(filter(None, (namespace, match[1])))
            found = list(_entries(source, inner, True))
            if not match[1].endswith("detail"):
                yield from found
        else:
            entry = _declaration(source, namespace)
            entry.doc = doc + entry.doc
            doc = []
            if public and entry.kind != "skip":
                yield entry
    if doc:
        yield Entry("doc", "", "", doc)


def _declaration(source: _Source, namespace: str) -> Entry:
    """The next declaration, with its body consumed."""
    text, behind, raw = "", [], []
    while True:
        raw.append(source.next())
        line = raw[-1].strip()
        code, mark, comment = line.partition("///<")
        if mark:
            behind.append(comment.strip())
        if remark := re.match(r"(.*;)\s*// (.*)$", code):
            code = remark[1]
            behind.append(remark[2])
        code = re.sub(r"^// .*$", "", code)
        text = f"{text} {code.strip()}".strip()
        if re.match(r"(class|struct)\b[^;(=]*\{$", _untemplated(text)):
            kind, name = "type", _type_name(text)
            heading = text.removesuffix("{").replace("APEX_API ", "").strip()
            return Entry(
                kind, name, heading, behind,
                list(_entries(source, namespace, heading_is_struct(heading), members=True)),
                namespace,
            )  # fmt: skip
        depth = sum(text.count(c) for c in OPENERS) - sum(text.count(c) for c in CLOSERS)
        if depth == 0 and (text.endswith((";", "}")) or _is_macro(text)):
            break
    if re.match(r"enum\b", text):
        # The comments of its values stay next to them.
        return Entry("type", _type_name(text), _enum("\n".join(raw)), [], [], namespace)
    return _classify(text, behind, namespace)


def heading_is_struct(heading: str) -> bool:
    return re.match(r"struct\b", _untemplated(heading)) is not None


def _untemplated(text: str) -> str:
    """The text without a leading `template <...>`."""
    if not text.startswith("template"):
        return text
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">" and text[at - 1] != "-")
        if letter == ">" and depth == 0:
            return text[at + 1 :].strip()
    return ""


def _type_name(text: str) -> str:
    heading = re.sub(r"\b(class|struct|enum|APEX_API|final)\b", "", _untemplated(text))
    return re.split(r"\s*(?:[:{;]|$)", heading.strip().replace("::", "\0"))[0].replace("\0", "::")


def _is_macro(text: str) -> bool:
    return re.fullmatch(r"[A-Z_]+\(.*\)", text) is not None


def _enum(text: str) -> str:
    return textwrap.dedent(text).replace("///<", "//")


def _classify(text: str, doc: list[str], namespace: str) -> Entry:
    text = re.sub(r"\(\s+", "(", re.sub(r"\bAPEX_API ", "", text))
    bare = _untemplated(text)
    if module := re.fullmatch(r"TORCH_MODULE\((\w+)\);", text):
        about = [
            f"The holder of `{module[1]}Impl`: a `std::shared_ptr` with that module's constructors."
        ]
        return Entry("type", module[1], f"class {module[1]}", about, namespace=namespace)
    if (
        re.match(r"(friend\b|(class|struct) [\w:]+;$)", bare)
        or text.endswith("= delete;")
        or _is_macro(text)
    ):
        return Entry("skip", "", text)
    if match := re.match(r"using ([\w:]+)( =|;)", bare):
        return Entry("value", match[1].rpartition("::")[2], text, doc, namespace=namespace)
    call = re.search(r"(operator\s*(?:\(\)|[^\s\w(]+)|~?\w+)\s*\(", bare)
    assigned = re.search(r"(?<![=<>!])=(?!=)", bare)
    if call and (not assigned or call.start() < assigned.start()):
        return Entry("function", call[1], _without_body(text), doc, namespace=namespace)
    name = re.match(r".*?(\w+)\s*(?:=|\{|;)", bare.replace("::", "\0"))
    return Entry("value", name[1] if name else "", text, doc, namespace=namespace)


def _without_body(text: str) -> str:
    """A function without its body and initializers."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter in OPENERS) - (letter in CLOSERS)
        if depth == 1 and letter == "{" or depth == 0 and re.match(r" : \w", text[at:]):
            return text[:at].strip() + ";"
    return text


# --- Markdown ---


def reference() -> str:
    """A section per header, in the order of the includes in <apex/parallel.h>."""
    names = re.findall(r"#include <(apex/[\w/]+\.h)>", (INCLUDE / "apex/parallel.h").read_text())
    parts = []
    for name in names:
        entries = read_header(INCLUDE / name)
        parts.append(f"## `<{name}>`\n")
        for entry in entries:
            parts += _render(entry)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts))


def _render(entry: Entry) -> list[str]:
    if entry.kind == "doc":
        return [markdown(entry.doc), ""]
    full = f"{entry.namespace}::{entry.name}" if entry.namespace else entry.name
    lines = [f"### `{full}`", "", *_code([entry]), markdown(entry.doc), ""]
    group: list[Entry] = []  # a function, and the undocumented ones that follow it
    for member in entry.members:
        if member.name.startswith("~") and not member.doc:
            continue
        if group and (member.doc or member.kind != "function"):
            lines += [*_code(group), markdown(group[0].doc), ""]
            group = []
        if member.kind == "doc":
            lines += [markdown(member.doc), ""]
        elif member.kind == "value":
            text = markdown(member.doc).replace("\n", "\n  ")
            lines += [f"`{member.text}`", ": " + (text or "\u2013"), ""]
        else:
            group.append(member)
    if group:
        lines += [*_code(group), markdown(group[0].doc), ""]
    return lines


def _code(entries: list[Entry]) -> list[str]:
    lines = []
    for entry in entries:
        lines += (
            entry.text.splitlines()
            if "\n" in entry.text
            else textwrap.wrap(
                entry.text,
                92,
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return ["```cpp", *lines, "```", ""]


def markdown(doc: list[str]) -> str:
    """The text of a comment: its tags as a list, indented lines as code, the rest escaped."""
    lines: list[str] = []
    tagged = False
    for line in doc:
        if match := re.match(r"@(param|throws|return|returns)\s+(.*)", line):
            if not tagged:
                lines.append("")
            tagged = True
            if match[1] == "param":
                name, _, rest = match[2].partition(" ")
                lines.append(f"- `{name}`: {_escaped(rest.strip())}")
            else:
                verb = "throws" if match[1] == "throws" else "returns"
                lines.append(f"- {verb} {_escaped(match[2])}")
        elif tagged:
            lines.append("  " + _escaped(line.strip()) if line.strip() else "")
            tagged = bool(line.strip())
        elif line.startswith("    "):
            if lines and lines[-1] and not lines[-1].startswith("    "):
                lines.append("")
            lines.append(line)
        else:
            lines.append(_escaped(line))
    return "\n".join(lines).strip("\n")


def _escaped(line: str) -> str:
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*<_\[\]|$])", r"\\\1", part) for part in parts
    )
