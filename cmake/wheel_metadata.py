# SPDX-License-Identifier: BSD-3-Clause
"""The metadata that pyproject.toml leaves to the build: the version, and the torch of a wheel.

C++ libraries of two minor versions of torch are incompatible. So a wheel requires the torch that it
was built with, ``torch==2.13.*``, and names it in its version, ``0.1.0+torch2.13.cpu``. Installers
then do not combine it with another torch. A source distribution works with every torch from 2.11.

Called by scikit-build-core: see [[tool.dynamic-metadata]] in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

LEAST_TORCH = "2.11"


class Torch(NamedTuple):
    """A torch package.

    Args:
        minor: its version without the patch level, "2.13".
        flavor: its platform, "cpu", "cu130" or another local version label.
    """

    minor: str
    flavor: str


def release() -> str:
    """The version of the sources, from cpp/include/apex/version.h."""
    text = Path("cpp/include/apex/version.h").read_text(encoding="utf-8")
    return ".".join(
        re.search(rf"#define APEX_VERSION_{part} (\d+)", text)[1]  # type: ignore[index]
        for part in ("MAJOR", "MINOR", "PATCH")
    )


def find_torch() -> Torch | None:
    """The torch of Libtorch_ROOT or of this environment. It is not imported.

    cmake/FindLibtorch.cmake finds the same one, unless Torch_ROOT, Torch_DIR or CMAKE_PREFIX_PATH
    name another. Do not set them for a wheel: its metadata would name the wrong torch.
    """
    folders = []
    if os.environ.get("Libtorch_ROOT"):
        root = Path(os.environ["Libtorch_ROOT"])
        folders += [root, root / "torch"]
    spec = importlib.util.find_spec("torch")
    if spec is not None:
        folders += map(Path, spec.submodule_search_locations or ())
    for folder in folders:
        if (folder / "version.py").is_file():
            return read_torch((folder / "version.py").read_text(encoding="utf-8"))
    return None


def read_torch(version_py: str) -> Torch:
    """Parse the text of torch/version.py."""
    values = dict(re.findall(r"^(\w+)[^=\n]* = '([^']+)'", version_py, re.MULTILINE))
    version, _, label = values["__version__"].partition("+")
    minor = ".".join(version.split(".")[:2])
    if re.fullmatch("cpu|(cu|rocm|xpu)[0-9.]*", label):
        return Torch(minor, label)
    # PyPI does not allow labels.
    return Torch(minor, "cu" + values["cuda"].replace(".", "") if "cuda" in values else "cpu")


def local_version(torch: Torch) -> str:
    """The local part of a wheel's version."""
    # If pip has downloaded a source distribution, it requires the version in that file's name.
    if Path("PKG-INFO").is_file() and "PIP_BUILD_TRACKER" in os.environ:
        return ""
    return f"+torch{torch.minor}.{torch.flavor}"


class Provider:
    """The hooks that scikit-build-core calls."""

    def __init__(self) -> None:
        self.state = "wheel"

    def build_state(self, build_state: str) -> None:
        self.state = build_state

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        """A wheel's requirements differ from those of the source distribution."""
        return {"dependencies": True}

    def dynamic_metadata(
        self, settings: Mapping[str, Any], project: Mapping[str, Any]
    ) -> dict[str, Any]:
        if self.state == "sdist":
            return {"version": release(), "dependencies": [f"torch>={LEAST_TORCH}"]}
        torch = find_torch()
        if torch is None:
            # No traceback, because the message is sufficient.
            sys.exit(
                "apex-parallel is built for the torch of this environment, and there is none: "
                "run `pip install torch`, then build with --no-build-isolation."
            )
        return {
            "version": release() + local_version(torch),
            "dependencies": [f"torch=={torch.minor}.*"],
        }
