# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures shared by the tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ddp_support import RankPool, close_shared_pool, shared_pool

os.environ.setdefault("APEX_FAULTS_SLOWER", "3")  # before the campaign is imported
# By default inductor starts processes to compile in, precompiles headers, tries instruction sets.
for _name in ("COMPILE_THREADS=1", "CPP_CACHE_PRECOMPILE_HEADERS=0", "VEC_ISA_OK=0"):
    os.environ.setdefault(*f"TORCHINDUCTOR_{_name}".split("="))

# A shell that starts the tests in the background may have them ignore SIGINT, and with them the
# processes that they interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)

#: The tests of `scripts/test.sh --quick`: in each area, the ones that draw or compare the most.
QUICK = (
    "test_amp_programs.py::test_program_of_one_process",
    "test_batch_norm_programs.py::test_batch_norm_programs_equal_one_process[2]",
    "test_ddp_comm_hooks.py",
    "test_ddp_gradients.py::test_gradients_every_model_equal_whole_batch",
    "test_ddp_join.py::test_join_uneven_counts_equal_one_process",
    "test_ddp_programs.py::test_programs_equal_one_process[2-1000]",
    "test_fp16_utils_optimizer.py",
    "test_fused_optimizers.py",
    "test_group_names.py",
    "test_larc.py",
    "test_multiproc.py::test_environment_every_rank_is_complete",
    "test_old_names.py",
)

#: The slowest files, which start first, so that no worker is alone with one of them at the end.
SLOWEST = (
    "test_dead_rank",
    "test_ddp_programs",
    "test_examples",
    "test_static_analysis",
    "test_ddp_compile",
    "test_host_backend",
    "test_doctor",
    "test_sharded_optimizer",
    "test_multiproc",
    "test_package_wheel",
    "test_amp_programs",
    "test_old_scripts",
    "test_elastic_restart",
    "test_stalls",
    "test_sync_batch_norm",
    "test_ddp_exit",
    "test_ranks_apart",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files, and mark tests.

    With --dist=loadfile --no-loadscope-reorder, each file goes to the next worker that has no work.
    """
    places = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        if item.nodeid.rpartition("/")[2].startswith(QUICK):
            item.add_marker(pytest.mark.quick)
        if item.get_closest_marker("cuda") or item.get_closest_marker("nccl"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Four processes for the whole session. ``ranks.run(world, body, *args)`` uses some of them."""
    return shared_pool()


@pytest.fixture(scope="session")
def prefix() -> Path:
    """The output of `python -m apex.cmake_dir`."""
    command = [sys.executable, "-m", "apex.cmake_dir"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    folder = Path(output.strip())
    if not (folder / "lib" / "cmake" / "apex" / "apexConfig.cmake").is_file():
        pytest.skip("apex is imported from a build tree here, not from an installation")
    return folder


def pytest_sessionfinish() -> None:
    close_shared_pool()
