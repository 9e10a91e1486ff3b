# SPDX-License-Identifier: BSD-3-Clause
"""Finds the options for ``multiproc`` in a script and its arguments, without running the script."""

import ast
import re
from collections.abc import Sequence
from pathlib import Path

#: Options that give a process its place in the job, and the environment variables of their values.
RANK_OPTIONS = {
    "--rank": "RANK",
    "--world-size": "WORLD_SIZE",
    "--world_size": "WORLD_SIZE",
    "--local_rank": "LOCAL_RANK",
    "--local-rank": "LOCAL_RANK",
}


def options_taken(script: Path) -> tuple[str, ...]:
    """The RANK_OPTIONS that the script's source passes to a method ``add_argument``."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if getattr(call.func, "attr", None) == "add_argument"]
    names = {a.value for call in calls for a in call.args if isinstance(a, ast.Constant)}
    return tuple(option for option in RANK_OPTIONS if option in names)


def options_end(arguments: Sequence[str]) -> int:
    """The index of the first ``--``. No argument after it is an option."""
    return [*arguments, "--"].index("--")


def appended(options: Sequence[str], arguments: Sequence[str]) -> tuple[str, ...]:
    """The first of these options for each value that the arguments do not already set."""
    before = arguments[: options_end(arguments)]
    given = {RANK_OPTIONS.get(argument.partition("=")[0]) for argument in before}
    by_value: dict[str, str] = {}
    for option in options:
        by_value.setdefault(RANK_OPTIONS[option], option)
    return tuple(option for value, option in by_value.items() if value not in given)


def world_size(arguments: Sequence[str]) -> int | None:
    """The number after the last ``--world-size``; None without one."""
    joined = "\0" + "\0".join(arguments[: options_end(arguments)]) + "\0"
    found = re.findall(r"(?<=\0)--world[-_]size[=\0](\d+)(?=\0)", joined)
    return int(found[-1]) if found else None
