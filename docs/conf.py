# SPDX-License-Identifier: BSD-3-Clause
"""Sphinx configuration: pages in Markdown, reference from the docstrings.

Needs torch, but no built package: the docstrings are read from the sources.
"""

import os
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
    """Make `import apex` work on the sources alone. Returns the modules that Sphinx must mock."""
    import torch

    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]
    sys.path.insert(0, str(ROOT / "python"))
    # From the same template that CMake uses, as for a package that matches this torch, so that no
    # name is missing.
    template = (ROOT / "python/src/build_info.py.in").read_text()
    said = {
        "PROJECT_VERSION": _version(),
        "Libtorch_FULL_VERSION": torch.__version__,
        "Libtorch_CXX11_ABI": int(torch._C._GLIBCXX_USE_CXX11_ABI),
        "Libtorch_CUDA_VERSION": torch.version.cuda or "",
        "APEX_WITH_CUDA": "ON" if torch.version.cuda else "OFF",
    }
    build_info = types.ModuleType("apex._build_info")
    exec(re.sub(r"@(\w+)@", lambda name: str(said.get(name[1], "")), template), vars(build_info))
    sys.modules["apex._build_info"] = build_info
    return ["apex._core"]


def _repository() -> str:
    """Where the sources are published, or ""."""
    on_github = "GITHUB_REPOSITORY" in os.environ and (
        f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    )
    url = os.environ.get("READTHEDOCS_GIT_CLONE_URL") or on_github
    return (url or "").removesuffix("/").removesuffix(".git")


project = "apex-parallel"
release = version = _version()
copyright = "the apex-parallel authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
maximum_signature_line_length = 80
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
html_theme = "furo"
repository = _repository()
html_theme_options: dict[str, object] = {}
if repository:
    icon = {"name": "Repository", "url": repository, "html": "repository", "class": ""}
    html_theme_options["footer_icons"] = [icon]
if repository.startswith("https://github.com/"):  # furo knows where pages are shown there
    html_theme_options |= {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_title = f"apex-parallel {release}"


def _read_page(app: object, docname: str, source: list[str]) -> None:
    """Files that are not part of the site become links to the repository.

    Where it is not known, they are not links.
    """
    folder = (ROOT / "docs" / docname).parent

    def unlink(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if not target.exists() or ROOT / "docs" in target.parents:
            return link[0]
        if repository:
            return f"[{link[1]}]({repository}/blob/main/{target.relative_to(ROOT)})"
        return link[1]

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]+)\)", unlink, source[0])


def setup(app: object) -> None:
    app.connect("source-read", _read_page)


# Use the sources even if a package is installed, which may be built from other sources.
autodoc_mock_imports = _use_sources()
