# SPDX-License-Identifier: BSD-3-Clause
"""``python -m apex`` prints how this installation was built: the summary that CMake printed."""

from apex import _build_info, cmake_dir


def summary() -> str:
    """Version, torch, compiler, CUDA parts, NCCL backend and C++ package, one per line."""

    def part(name: str, there: bool, reason: str) -> tuple[str, str]:
        return name, f"{'ON' if there else 'OFF'} ({reason})"

    rows = [
        ("libtorch", _build_info.torch_version),
        ("C++", _build_info.compiler),
        part("CUDA parts", _build_info.with_cuda, _build_info.cuda_reason),
        part("NCCL backend", _build_info.with_nccl, _build_info.nccl_reason),
        ("C++ package", str(cmake_dir.get_cmake_dir())),
    ]
    lines = [f"  {name:<13} {value}" for name, value in rows]
    return "\n".join([f"apex {_build_info.version}", *lines])


if __name__ == "__main__":
    print(summary())
