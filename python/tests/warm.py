# SPDX-License-Identifier: BSD-3-Clause
"""Runs scripts in processes that have imported torch, because the import takes longest.

Destructors of statics and functions registered with ``atexit`` do not run. Processes that a script
starts with ``mp.spawn`` are forked from the script. As with torch's, their arguments are pickled,
and they import the script again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing import connection, popen_fork, popen_spawn_posix, spawn
from multiprocessing.context import (
    SpawnContext,
    SpawnProcess,
    reduction,
    set_spawning_popen,
)
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_support import PRELOADED

from apex.parallel import _multiproc_child


def run_script(
    script: Path | str,
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str],
    timeout_s: float = 600,
    without: str | None = None,
    forks_ranks: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Like ``python script arguments`` in that folder. Returns its stdout and stderr.

    Args:
        without: a package that the script must import itself, because PYTHONPATH may hold another
            one.
        forks_ranks: the script is torchrun. Its agent forks the ranks instead of starting a new
            ``python`` for each.

    Raises:
        subprocess.TimeoutExpired: it was killed after the timeout.
    """
    out, err = cwd / "stdout.txt", cwd / "stderr.txt"
    process = _start(script, arguments, cwd, env, out, err, without, forks_ranks)
    return _finish([process], [str(script), *arguments], out, err, timeout_s)


class Popen:
    """Like ``subprocess.Popen`` of ``python script arguments``, with a pipe for its stdout."""

    def __init__(
        self,
        script: Path | str,
        *arguments: str,
        cwd: Path,
        env: Mapping[str, str],
        forks_ranks: bool = False,
    ) -> None:
        self.args = [str(script), *arguments]
        self._err = cwd / "stderr.txt"
        os.mkfifo(cwd / "stdout")
        self._process = _start(
            script, arguments, cwd, env, cwd / "stdout", self._err, forks_ranks=forks_ranks
        )
        self.stdout = (cwd / "stdout").open()
        self.pid = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Waits until all processes that have the pipe open have ended."""
        ended = threading.Timer(timeout, _end_with_stacks, [[self.pid]])
        ended.start()
        out = self.stdout.read()
        ended.cancel()
        self._process.join()
        return out, self._err.read_text()


def run_script_on_ranks(
    ranks: int,
    script: Path | str,
    *arguments: str,
    cwd: Path,
    env: Mapping[str, str],
    timeout_s: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Like ``python -m apex.parallel.multiproc --nproc=ranks script arguments`` in that folder.

    ``env`` contains MASTER_ADDR and MASTER_PORT. The exit code is that of the first rank that
    failed. The others are then killed. Output goes to rank_<rank>.log, as with multiproc.

    Raises:
        subprocess.TimeoutExpired: they were killed after the timeout.
    """
    out, err = cwd / "stdout.txt", cwd / "stderr.txt"
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        mine = {**env, **{name: str(number) for name, number in place.items()}}
        log = cwd / f"rank_{rank}.log"
        files = (out, err) if rank == 0 else (log, log)
        child = (_multiproc_child.__file__, (str(script), *arguments))
        processes.append(_start(*child, cwd, mine, *files))
    return _finish(processes, [str(script), *arguments], out, err, timeout_s)


def _start(
    script: Path | str,
    arguments: tuple[str, ...],
    cwd: Path,
    env: Mapping[str, str],
    out: Path,
    err: Path,
    without: str | None = None,
    forks_ranks: bool = False,
) -> BaseProcess:
    multiprocessing.set_forkserver_preload(PRELOADED)
    process = multiprocessing.get_context("forkserver").Process(
        target=_main,
        args=(
            str(script),
            arguments,
            str(cwd),
            dict(env),
            str(out),
            str(err),
            without,
            forks_ranks,
        ),
    )
    process.start()
    return process


def _finish(
    processes: list[BaseProcess], command: list[str], out: Path, err: Path, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    deadline = time.monotonic() + timeout_s
    running = {process.sentinel: process for process in processes}
    code = 0
    while running:
        ended = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            code = code or process.exitcode
        if running and (code or not ended):
            if not code:
                _end_with_stacks([process.pid for process in running.values()])
            for process in running.values():
                process.kill()
                process.join()
            if not code:
                print(err.read_text(), file=sys.stderr)
                raise subprocess.TimeoutExpired(command, timeout_s, out.read_bytes())
            break
    return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())


def _end_with_stacks(pids: list[int | None]) -> None:
    """Kill these processes and their children, after each has written its stacks to stderr."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid for pid in pids if pid is not None]
    for pid in found:
        found += children.get(pid, [])
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)  # the timeout is over already; each process writes its stacks or does not
    for pid in found:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _main(
    script: str,
    arguments: tuple[str, ...],
    cwd: str,
    env: dict[str, str],
    out: str,
    err: str,
    without: str | None,
    forks_ranks: bool,
) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND), number)
    faulthandler.register(signal.SIGUSR1, file=2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [script, *arguments]
    more = env.get("PYTHONPATH")
    _path.update(sys.path)
    sys.path[:0] = [os.path.dirname(script), *(more.split(os.pathsep) if more else [])]
    if without is not None:
        for name in [name for name in sys.modules if name.partition(".")[0] == without]:
            del sys.modules[name]
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = _Context()
    if forks_ranks:
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = _Rank
    runpy.run_path(script, run_name="__main__")


# --- `mp.spawn` in a script: processes forked from it, which do as spawned ones ---


#: The search path without folders of the script.
_path: set[str] = set()


class _Popen(popen_fork.Popen):
    method = "spawn"
    DupFd = popen_spawn_posix._DupFd  # of file descriptors within pickled objects

    def _launch(self, process_obj: Any) -> None:
        with tempfile.TemporaryFile() as sent:
            set_spawning_popen(self)
            try:
                reduction.dump(spawn.get_preparation_data(process_obj._name), sent)
                reduction.dump(process_obj, sent)
            finally:
                set_spawning_popen(None)
            sent.seek(0)
            super()._launch(_Sent(sent.fileno()))


class _Sent:
    """A pickled process, which the forked process unpickles and runs."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def _bootstrap(self, parent_sentinel: int) -> int:
        # The script and its own modules are imported again.
        for name, module in [*sys.modules.items()]:
            if os.path.dirname(getattr(module, "__file__", None) or "") in _script_folders():
                del sys.modules[name]
        sys.modules["__main__"] = ModuleType("__main__")
        return spawn._main(self._fd, parent_sentinel)  # type: ignore[attr-defined]


def _script_folders() -> set[str]:
    return {os.path.abspath(folder) for folder in sys.path if folder not in _path}


class _Process(SpawnProcess):
    _Popen = staticmethod(_Popen)


class _Context(SpawnContext):
    Process = _Process


# --- torchrun: ranks forked from it ---


class _Rank:
    """Replaces ``subprocess.Popen`` of ``python -u script arguments``, or ``-u -m module``."""

    def __init__(
        self, args: tuple[str, ...], env: Mapping[str, str], start_new_session: bool, **files: Any
    ) -> None:
        python, unbuffered, *self.args = args
        assert (python, unbuffered, start_new_session) == (sys.executable, "-u", True), args
        assert files == {"stdout": None, "stderr": None}, files
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                code = self._run(env)
            finally:
                os._exit(code)

    def _run(self, env: Mapping[str, str]) -> int:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # the agent handles them
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        try:
            if self.args[0] == "-m":
                sys.argv = self.args[1:]
                sys.path[0] = os.getcwd()
                runpy.run_module(self.args[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = self.args
                sys.path[0] = os.path.dirname(os.path.abspath(self.args[0]))
                runpy.run_path(self.args[0], run_name="__main__")
            code: Any = None
        except SystemExit as end:
            code = end.code
        except BaseException:  # noqa: BLE001  (as the interpreter does)
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        if isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stderr.flush()
        return code if isinstance(code, int) else int(code is not None)

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.01)
        return code

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode
