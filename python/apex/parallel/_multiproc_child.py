# SPDX-License-Identifier: BSD-3-Clause
"""A process of ``multiproc``: runs the script given as the first argument. Standard library only,
because the script may set variables before it imports torch."""

import argparse
import ctypes
import fcntl
import itertools
import os
import runpy
import signal
import sys
from typing import Any

_WORLD_SIZE = ("--world-size", "--world_size")
_VALUES = {
    "RANK": ("--rank",),
    "WORLD_SIZE": _WORLD_SIZE,
    "LOCAL_RANK": ("--local_rank", "--local-rank"),
}
_PR_SET_PDEATHSIG = 1
_parse = argparse.ArgumentParser.parse_known_args


def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
    """argparse's method. Before it parses ``sys.argv``, the options of a rank that the parser
    defines are inserted there. A ``--rank`` without ``--world-size`` has another meaning."""
    if args is None or args == sys.argv[1:]:
        options = itertools.takewhile(lambda argument: argument != "--", sys.argv[1:])
        given = {argument.partition("=")[0] for argument in options}
        defined = self._option_string_actions
        for variable, names in _VALUES.items():
            taken = [name for name in names if name in defined]
            if variable == "RANK" and defined.keys().isdisjoint(_WORLD_SIZE):
                continue
            if taken and given.isdisjoint(names):
                sys.argv.insert(1, f"{taken[0]}={os.environ[variable]}")
        args = sys.argv[1:]
    return _parse(self, args, namespace)


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    if sys.platform == "linux":  # the kernel ends this process with the launcher
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.environ["RANK"] != "0":
        fcntl.fcntl(1, fcntl.F_SETFL, os.O_APPEND)  # another job may write to the same file
        os.dup2(1, 2)
    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    runpy.run_path(sys.argv[0], run_name="__main__")
