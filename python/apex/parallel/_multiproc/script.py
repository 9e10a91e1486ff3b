# SPDX-License-Identifier: BSD-3-Clause
"""What ``multiproc`` finds out about a script, and about its arguments, without running it.

A script takes an option if its source calls a method named ``add_argument`` with that option as a
literal string. Options that are defined in another module, or by anything but ``add_argument``, are
not seen; ``multiproc --append`` says then what to append.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

#: The options that carry a process's place in the job, in every spelling that scripts use, and the
#: environment variable with their value.
RANK_OPTIONS = {
    "--rank": "RANK",
    "--world-size": "WORLD_SIZE",
    "--world_size": "WORLD_SIZE",
    "--local_rank": "LOCAL_RANK",
    "--local-rank": "LOCAL_RANK",
}
WORLD_SIZE_OPTIONS = frozenset({"--world-size", "--world_size"})


def options_taken(script: Path) -> frozenset[str]:
    """Those of ``RANK_OPTIONS`` that the script defines; none if it is no Python source."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    return frozenset(
        argument.value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "add_argument"
        for argument in call.args
        if isinstance(argument, ast.Constant) and argument.value in RANK_OPTIONS
    )


def appended(
    takes: frozenset[str], arguments: Sequence[str], choice: tuple[str, ...] | None
) -> tuple[str, ...]:
    """The options to append, one per value.

    Args:
        takes: what ``options_taken`` said.
        arguments: those that the script is given anyway; an option among them is not appended.
        choice: what to append instead of what the script takes; None: no wish.
    """
    wanted = RANK_OPTIONS if choice is None else choice
    given = {RANK_OPTIONS.get(argument.partition("=")[0]) for argument in arguments}
    by_value: dict[str, str] = {}
    for option in wanted:
        variable = RANK_OPTIONS[option]
        if (choice is not None or option in takes) and variable not in given:
            by_value.setdefault(variable, option)
    return tuple(by_value.values())


def split_world_size(arguments: Sequence[str], keep: bool) -> tuple[list[str], int | None]:
    """The script's arguments, and the number after the last ``--world-size`` among them.

    Args:
        arguments: of the script.
        keep: leave the option where it is; otherwise it is taken out.

    A ``--world-size`` without a number is left to the script, to complain about or to understand.
    """
    rest: list[str] = []
    world: int | None = None
    position = 0
    while position < len(arguments):
        name, equals, value = arguments[position].partition("=")
        used = 1
        if name in WORLD_SIZE_OPTIONS:
            if not equals and position + 1 < len(arguments):
                value, used = arguments[position + 1], 2
            if value.isdecimal():
                world = int(value)
                if not keep:
                    position += used
                    continue
            else:
                used = 1
        rest += arguments[position : position + used]
        position += used
    return rest, world
