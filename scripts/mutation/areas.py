# SPDX-License-Identifier: BSD-3-Clause
"""The mutated sources, the number of mutants, and the tests that run on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Area:
    """Some sources, and the number of mutants drawn from them."""

    name: str
    quota: int
    globs: tuple[str, ...]
    without: tuple[str, ...] = ()


#: A file belongs to the first area that lists it. Missing folders are ignored, because sources
#: move.
AREAS = (
    Area(
        "buckets",
        30,
        ("cpp/src/**/bucket*.cpp", "cpp/src/**/multi_tensor.cpp"),
    ),
    Area(
        "strategies and communication",
        40,
        (
            "cpp/src/comm/*.cpp",
            "cpp/src/reducer/reduction.*",
        ),
    ),
    Area("reducer", 50, ("cpp/src/reducer/**/*.cpp", "cpp/src/step/*.cpp")),
    Area(
        "batch norm",
        45,
        (
            "cpp/src/batch_norm/*.cpp",
            "cpp/src/kernels/batch_norm_math.h",
        ),
        without=("*_cuda.cpp", "*_no_cuda.cpp"),
    ),
    Area("watch and transport", 30, ("cpp/src/watch/*.cpp", "cpp/src/transport/*.cpp")),
    Area("optimizers, checkpoints", 20, ("cpp/src/optim/*.cpp", "cpp/src/checkpoint/*.cpp")),
    Area("process groups", 10, ("cpp/src/distributed/*.cpp",)),
    Area("amp, C++", 10, ("cpp/src/amp/*.cpp",)),
    Area("wrapper, Python", 30, ("python/apex/parallel/*.py", "python/apex/optimizers/*.py")),
    Area("amp, Python", 35, ("python/apex/amp/*.py",)),
)

#: The executables of cpp/tests that run, fastest first.
CPP_TESTS = (
    "apex_kernel_tests",
    "apex_hosts_tests",
    "apex_fake_device_tests",
    "apex_emulated_cuda_tests",
    "apex_unit_tests",
    "apex_multiprocess_tests",
)

#: The calls of pytest in python/tests. Each is a list of arguments and is recorded separately.
PYTHON_TESTS = (
    ("-m", "not slow", "test_amp*.py", "test_fp16_utils*.py"),
    ("-m", "not slow", "test_sync_batch_norm*.py"),
    ("-m", "not slow", "test_ddp_errors.py", "test_faults.py", "test_ranks_apart.py"),
    ("-m", "not slow", "test_ddp_one_rank_fails.py", "test_ddp_several.py", "test_ddp_steps.py"),
    ("-m", "quick", "test_*.py"),
)
