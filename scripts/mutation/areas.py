# SPDX-License-Identifier: BSD-3-Clause
"""The mutated sources, the number of mutants, and the tests that run on them."""

from __future__ import annotations

from dataclasses import dataclass

OPTIMIZERS = ("optim", "checkpoint", "amp")


@dataclass(frozen=True)
class Area:
    """Some sources, and the number of mutants drawn from them."""

    name: str
    quota: int
    globs: tuple[str, ...]
    without: tuple[str, ...] = ()


#: A file belongs to the first area that lists it.
AREAS = (
    Area("buckets", 18, ("cpp/src/reducer/*bucket*.cpp", "cpp/src/reducer/*tensor.cpp")),
    Area("reducer", 24, ("cpp/src/reducer/*.cpp", "cpp/src/parallel/*.cpp")),
    Area("step", 10, ("cpp/src/step/*.cpp",)),
    Area("comm", 16, ("cpp/src/comm/*.cpp",)),
    Area("transport", 16, ("cpp/src/transport/*.cpp",)),
    Area("watch", 16, ("cpp/src/watch/*.cpp",)),
    Area("process groups", 10, ("cpp/src/distributed/*.cpp",), without=("*nccl.cpp",)),
    Area(
        "batch norm",
        18,
        ("cpp/src/batch_norm/*.cpp", "cpp/src/kernels/*.h"),
        without=("*_no_cuda.cpp",),
    ),
    Area("optimizers, checkpoints, amp", 12, tuple(f"cpp/src/{x}/*.cpp" for x in OPTIMIZERS)),
    Area("shared by all parts", 4, ("cpp/src/*.cpp",)),
    Area(
        "wrapper, Python",
        24,
        ("python/apex/parallel/*.py", "python/apex/optimizers/*.py", "python/apex/_internal/*.py"),
    ),
    Area("amp, Python", 18, ("python/apex/amp/*.py",)),
    Area("other modules, Python", 14, ("python/a*/*.py", "python/apex/*/*.py")),
)

#: The executables of cpp/tests that run, fastest first.
CPP_TESTS = (
    "apex_internals_tests",
    "apex_hosts_tests",
    "apex_fake_device_tests",
    "apex_emulated_cuda_tests",
    "apex_unit_tests",
    "apex_multiprocess_tests",
)

#: The calls of pytest in python/tests. Each is a list of arguments and is recorded separately.
PYTHON_TESTS = tuple(
    ("-m", "not nightly", *files)
    for files in (
        ("test_amp*.py", "test_fp16_utils*.py", "test_old*.py"),
        ("test_*batch_norm*.py", "test_fused*.py", "test_larc.py", "test_sharded_optimizer.py"),
        ("test_ddp*.py", "test_replica_check.py", "test_group_names.py", "test_torch_parts.py"),
        ("test_*host*.py", "test_ranks_apart.py", "test_dead_rank.py", "test_stalls.py"),
        ("test_d*_mistakes.py", "test_doctor.py", "test_multiproc.py", "test_not_served.py"),
        ("test_elastic_restart.py", "test_faults.py", "test_package_check.py"),
    )
)
