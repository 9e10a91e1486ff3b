# SPDX-License-Identifier: BSD-3-Clause
"""Sphinx configuration: pages in Markdown, reference from the docstrings.

Needs torch, but not a built package: without apex._core the docstrings are read from the sources.
"""

import re
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _version() -> str:
    text = (ROOT / "cpp/include/apex/version.h").read_text()
    return ".".join(
        re.search(rf"APEX_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH")
    )


def _use_sources() -> list[str]:
    """Make `import apex` work on the sources alone; returns what Sphinx has to mock."""
    import torch

    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]
    sys.path.insert(0, str(ROOT / "python"))
    # What CMake writes: says that the package fits this torch.
    build_info = types.ModuleType("apex._build_info")
    build_info.torch_version = str(torch.__version__)
    build_info.cxx11_abi = bool(torch._C._GLIBCXX_USE_CXX11_ABI)
    sys.modules["apex._build_info"] = build_info
    return ["apex._core"]


project = "apex-parallel"
release = version = _version()
copyright = "the apex-parallel contributors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"apex-parallel {release}"


def _unlink_sources(app: object, docname: str, source: list[str]) -> None:
    """Links out of docs/ are for readers of the repository; the pages keep their text."""
    source[0] = re.sub(
        r"\[([^\]]+)\]\(\.\./([^)#]+)\)",
        lambda link: link[1] if (ROOT / link[2]).exists() else link[0],
        source[0],
    )


def setup(app: object) -> None:
    app.connect("source-read", _unlink_sources)


try:
    import apex  # noqa: F401
except ImportError:
    autodoc_mock_imports = _use_sources()
