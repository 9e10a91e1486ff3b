# SPDX-License-Identifier: BSD-3-Clause
"""Forked scripts and ranks (warm.py) behave as those that start a new python."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path

import pytest
import torch.distributed.run
import warm
from ddp_support import free_port
from examples_support import environment

pytestmark = pytest.mark.processes

#: Each process reports the module that its function comes from, and how often it was imported.
SPAWNS = """
    import os, sys
    import torch, torch.multiprocessing as mp
    import beside
    beside.imported.append(__name__)
    class Argument:
        def __reduce__(self):
            return Argument, ()
    def report(index, tensor, *arguments):
        print(index, __name__, beside.imported, tensor.tolist(), os.environ["WORD"], flush=True)
    if __name__ == "__main__":
        mp.spawn(report, args=(torch.arange(2), Argument()), nprocs=2)
        try:
            mp.spawn(report, args=(torch.arange(2), lambda: 0))
        except Exception as error:
            print(type(error).__name__)
"""


def test_spawn_arguments_are_pickled_and_modules_imported_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SPAWNS))
    (tmp_path / "beside.py").write_text("imported = []\n")
    env = {**os.environ, "WORD": "yes"}
    done = warm.run_script(tmp_path / "script.py", cwd=tmp_path, env=env, timeout_s=120)
    assert done.returncode == 0, done.stderr
    *ranks, refused = done.stdout.splitlines()
    assert sorted(ranks) == [f"{rank} __mp_main__ ['__mp_main__'] [0, 1] yes" for rank in (0, 1)]
    assert refused in ("PicklingError", "AttributeError")


RANK = """
    import json, os, signal, sys
    assert __name__ == "__main__"
    rank = int(os.environ["RANK"])
    told = [sys.argv[1:], os.environ["WORLD_SIZE"], os.getsid(0) == os.getpid()]
    told.append(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    with open(f"told{rank}", "w") as file:
        json.dump(told, file)
    if "fail" in sys.argv and rank == 1:
        sys.exit(7)
    if "fail" in sys.argv:
        signal.pause()
"""


@pytest.mark.parametrize("how", ["end", "fail"])
def test_torchrun_ranks_are_as_started_by_it(how: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(textwrap.dedent(RANK))
    options = ["--nnodes=1", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = [torch.distributed.run.__file__, *options, str(tmp_path / "rank.py"), how, "--x=1"]
    done = warm.run_script(
        *command, cwd=tmp_path, env=environment(), timeout_s=120, forks_ranks=True
    )
    assert (done.returncode == 0) == (how == "end"), done.stderr
    assert ("exitcode  : 7" in done.stderr) == (how == "fail")
    for rank in (0, 1) if how == "end" else (1,):
        told = json.loads((tmp_path / f"told{rank}").read_text())
        assert told == [[how, "--x=1"], "2", True, True]


def test_popen_is_stopped_by_a_signal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import time\nprint('started', flush=True)\ntime.sleep(600)\n"
    )
    process = warm.Popen(tmp_path / "script.py", cwd=tmp_path, env=os.environ)
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(120) == ("", "")
    assert process.returncode == -signal.SIGTERM
