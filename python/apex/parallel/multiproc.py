# SPDX-License-Identifier: BSD-3-Clause
"""Starts a training script once per GPU, or once per core if there is no GPU.

    python -m apex.parallel.multiproc [options of torchrun] main.py [arguments of main.py]

It is ``torchrun``, except for what scripts for NVIDIA's Apex expect. A parser of ``argparse``, in
any module, that defines ``--rank`` and ``--world-size``, or ``--local_rank``, gets them as if they
were on the command line. A ``--world-size N`` there sets the number of processes. Rank 0 writes to
the terminal, rank N to ``rank_N.log`` in ``--log-dir``. ``OMP_NUM_THREADS`` is by default the
number of cores divided by the processes. The exit code is that of the process that failed first;
128 + N: signal N ended it or the launcher.
"""

import argparse
import os
import re
import sys
from pathlib import Path

from torch import cuda
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from apex.parallel import _multiproc_child


class RankLogs(LogsSpecs):
    """Rank 0 writes to the terminal, each other rank to its file in ``files``."""

    root_log_dir = ""  # abstract, and not used by the agent

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.files = Path(folder), dict[int, Path]()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ranks = {local_rank: int(env["RANK"]) for local_rank, env in envs.items()}
        self.files = {r: self.folder / f"rank_{r}.log" for r in ranks.values() if r > 0}
        stdouts = {local_rank: str(self.files.get(r, "")) for local_rank, r in ranks.items()}
        none = dict.fromkeys(envs, "")  # the child redirects stderr to stdout
        return LogsDest(stdouts=stdouts, stderrs=none, error_files=none)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with torchrun's options."""
    parser = run.get_args_parser()
    parser.prog = "python -m apex.parallel.multiproc"
    parser.add_argument("--nproc", dest="nproc_per_node", help="the same as --nproc-per-node")
    parser.set_defaults(nproc_per_node=None, master_port=None, log_dir=".")
    args = parser.parse_args(argv)
    arguments = " ".join(args.training_script_args)
    given = re.findall(r"(?<!\S)--world[-_]size[= ](\d+)(?!\S)", arguments)
    nodes = int(args.nnodes.split(":")[-1])
    world_size = int(given[-1]) if given else 0
    if args.nproc_per_node is None:
        args.nproc_per_node = str(world_size // nodes or cuda.device_count() or _cores())
    args.processes = run.determine_local_world_size(args.nproc_per_node)
    if given and world_size != args.processes * nodes:
        parser.error("--world-size is not --nproc x --nnodes")
    if nodes == 1 and not (args.master_port or args.rdzv_endpoint):
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "127.0.0.1:0"  # any free port
        args.local_addr = args.local_addr or "127.0.0.1"
    args.master_port = args.master_port or 29500
    return args


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def main(argv: list[str] | None = None) -> int:
    """The command ``apex-launch``: runs the processes of this node and returns the exit code."""
    args = parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // args.processes)))
    config, program, command = run.config_from_args(args)
    config.logs_specs = logs = RankLogs(args.log_dir)
    logs.folder.mkdir(parents=True, exist_ok=True)
    if not (args.module or args.no_python or args.run_path):
        command.insert(command.index(args.training_script), _multiproc_child.__file__)
    try:
        # the agent would substitute $
        elastic_launch(config, program)(*(part.replace("$", "$$") for part in command))
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code, log = failure.exitcode, logs.files.get(rank)
        how = f"exit code {code}" if code > 0 else f"signal {failure.signal_name()}"
        lines = [f"multiproc: rank {rank} failed with {how}; see {log or 'above'}"]
        if log and log.is_file():
            lines += log.read_text(errors="replace")[-(1 << 14) :].splitlines()[-40:]
        print(*lines, sep="\n", file=sys.stderr, flush=True)
        return code if code > 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main())
