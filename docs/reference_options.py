# SPDX-License-Identifier: BSD-3-Clause
"""Lists all options with their defaults from the sources. conf.py inserts the list into options.md.

Python: signatures and the section "Args:" of docstrings. C++: structs of options. CMake: option()
and cache variables.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import reference_cpp

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / "python" / "apex"
#: Name, file, and where the signature is: a function, or a class with its __init__.
PYTHON_OPTIONS = (
    ("apex.parallel.DistributedDataParallel", "parallel/distributed.py", "DistributedDataParallel"),
    ("apex.parallel.SyncBatchNorm", "parallel/sync_batchnorm.py", "SyncBatchNorm"),
    ("apex.parallel.convert_syncbn_model", "parallel/syncbn_convert.py", "convert_syncbn_model"),
    (
        "apex.parallel.OverlappedOptimizer",
        "parallel/overlapped_optimizer.py",
        "OverlappedOptimizer",
    ),
    ("apex.parallel.LARC.LARC", "parallel/LARC.py", "LARC"),
    ("apex.parallel.Reducer", "parallel/_reducer.py", "Reducer"),
    ("apex.amp.initialize", "amp/frontend.py", "initialize"),
    ("apex.amp.scale_loss", "amp/scaling.py", "scale_loss"),
    ("apex.fp16_utils.FP16_Optimizer", "fp16_utils/fp16_optimizer.py", "FP16_Optimizer"),
)
CPP_HEADERS = (
    "apex/parallel/distributed_data_parallel.h",
    "apex/parallel/reducer.h",
    "apex/parallel/bucket_assignment.h",
    "apex/parallel/sync_batch_norm.h",
    "apex/parallel/larc.h",
    "apex/amp/loss_scaler.h",
    "apex/distributed/process_group.h",
)


def python() -> str:
    lines = []
    for name, file, where in PYTHON_OPTIONS:
        options = python_options(file, where)
        lines += [f"### `{name}`", "", "| option | default | |", "|---|---|---|"]
        lines += [
            f"| `{option}` | {f'`{default}`' if default else ''} | {about} |"
            for option, default, about in options
        ]
        lines.append("")
    return "\n".join(lines)


def python_options(file: str, where: str) -> list[tuple[str, str, str]]:
    """Name, default ("" for none) and documentation of each parameter."""
    tree = ast.parse((PYTHON / file).read_text())
    node = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == where
    )
    doc = ast.get_docstring(node) or ""
    signature = node
    if isinstance(node, ast.ClassDef):
        signature = next(
            part
            for part in node.body
            if isinstance(part, ast.FunctionDef) and part.name == "__init__"
        )
    assert isinstance(signature, ast.FunctionDef)
    about = _described(doc)
    arguments = signature.args
    positional = arguments.args
    missing = [None] * (len(positional) - len(arguments.defaults))
    found = list(zip(positional, [*missing, *arguments.defaults], strict=True))
    found += list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    return [
        (argument.arg, _default(default, PYTHON / file), about.get(argument.arg, ""))
        for argument, default in found
        if argument.arg != "self"
    ]


def _default(node: ast.expr | None, file: Path) -> str:
    if node is None:
        return ""
    text = ast.unparse(node)
    if constant := re.fullmatch(r"(_\w+)\.([A-Z_]+)", text):
        source = file.with_name(f"{constant[1]}.py").read_text()
        if value := re.search(rf"^{constant[2]}(?:: \w+)? = (.+)$", source, re.M):
            return value[1]
    return text


def _described(doc: str) -> dict[str, str]:
    """The entries of "Args:", each as one line."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.M | re.S)
    if section is None:
        return {}
    entries = re.findall(r"^    (\w+)(?: \([^)]*\))?: (.*?)(?=^    \S|\Z)", section[1], re.M | re.S)
    return {name: _cell(" ".join(text.split())) for name, text in entries}


def _cell(text: str) -> str:
    """The reStructuredText of a docstring as a cell of a Markdown table."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"([|<])", r"\\\1", text)


def cpp() -> str:
    lines = []
    for header in CPP_HEADERS:
        for entry in reference_cpp.read_header(reference_cpp.INCLUDE / header):
            if not re.search(r"(Options|Limits)$", entry.name):
                continue
            lines += [f"### `{entry.namespace}::{entry.name}`", "", f"In `<{header}>`.", ""]
            lines += ["| option | default | |", "|---|---|---|"]
            for member in entry.members:
                if member.kind != "value":
                    continue
                field = re.match(r"(.*?)(\w+)(?: = (.*)|\{(.*)\})?;$", member.text)
                assert field is not None, member.text
                about = " ".join(reference_cpp.markdown(member.doc).split()).replace("|", r"\|")
                default = f"`{field[3] or field[4]}`" if field[3] or field[4] else ""
                lines.append(f"| `{field[2]}` | {default} | {about} |")
            lines.append("")
    return "\n".join(lines)


def cmake() -> str:
    source = (ROOT / "CMakeLists.txt").read_text()
    lines = ["| option | default | |", "|---|---|---|"]
    for match in re.finditer(
        r'^(?:option\((APEX_\w+)\s+"([^"]*)"\s+([^\s)]+)\)'
        r'|set\((APEX_\w+) "([^"]*)" CACHE STRING\s+"([^"]*)"\))',
        source,
        re.M,
    ):
        name, about, default = (
            match[1] or match[4],
            match[2] or match[6],
            match[3] or match[5] or "",
        )
        default = {
            "${apex_default_tests}": "top level only",
            "${apex_top_level}": "top level only",
            "${apex_default_shared}": "`BUILD_SHARED_LIBS`, else `ON`",
            "${SKBUILD}": "`ON` under pip",
        }.get(default, f"`{default}`" if default else "")
        lines.append(f"| `{name}` | {default} | {about} |")
    return "\n".join(lines)


def launcher() -> str:
    """The options of apex.parallel.multiproc, from its calls of add_argument()."""
    tree = ast.parse((PYTHON / "parallel" / "multiproc.py").read_text())
    lines = ["| option | |", "|---|---|"]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(".add_argument"):
            continue
        flags = [a.value for a in node.args if isinstance(a, ast.Constant)]
        if not flags or not flags[0].startswith("--"):
            continue
        about = next((k.value for k in node.keywords if k.arg == "help"), None)
        text = ast.literal_eval(about) if isinstance(about, ast.Constant) else ""
        if isinstance(about, ast.JoinedStr):
            text = "".join(
                str(p.value) if isinstance(p, ast.Constant) else "…" for p in about.values
            )
        names = ", ".join(f"`{flag}`" for flag in flags)
        lines.append(f"| {names} | {_cell(inspect.cleandoc(text))} |")
    return "\n".join(lines)
