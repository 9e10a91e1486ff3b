"""Scripts in processes that have imported torch already: the import takes longer than most of them.

What ends a process, destructors of statics and functions registered with ``atexit``, does not run.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ddp_support import PRELOADED


def run_script(
    script: Path | str, *arguments: str, cwd: Path, env: Mapping[str, str], timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """As ``python script arguments`` in that folder, with what it wrote to stdout and stderr.

    Raises:
        subprocess.TimeoutExpired: when it was ended because time was up.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    out, err = cwd / "stdout.txt", cwd / "stderr.txt"
    process = multiprocessing.get_context("forkserver").Process(
        target=_main, args=(str(script), arguments, str(cwd), dict(env), str(out), str(err))
    )
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired([str(script), *arguments], timeout_s, out.read_bytes())
    assert process.exitcode is not None
    command = [str(script), *arguments]
    return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


def _main(
    script: str, arguments: tuple[str, ...], cwd: str, env: dict[str, str], out: str, err: str
) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [script, *arguments]
    more = env.get("PYTHONPATH")
    sys.path[:0] = [os.path.dirname(script), *(more.split(os.pathsep) if more else [])]
    runpy.run_path(script, run_name="__main__")
