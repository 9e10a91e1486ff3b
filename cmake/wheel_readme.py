# SPDX-License-Identifier: BSD-3-Clause
"""The long description and the links of a package, from README.md.

A package index shows only README.md, so its relative links do not work there. If
``APEX_SOURCE_URL`` names the public repository, for instance ``https://github.com/OWNER/NAME``,
every relative link becomes an absolute link to the tag of this version. The package then also links
the repository, its issues, its changelog and its documentation. Without that variable README.md is
not changed, and the package has no links. ``.github/workflows/release.yml`` sets the variable.

Called by scikit-build-core: see [[tool.dynamic-metadata]] in pyproject.toml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# An image or a link in Markdown, or an attribute in HTML, with a relative target. Code is matched
# too, so that it can be left unchanged: "[](int x)" begins a lambda in C++.
LINK = re.compile(
    r"""^```.*?^```$"""
    r"""|(?P<before>(?P<image>!?)\[[^\]]*\]\(|\b(?P<attribute>src|href)=")(?!\w+:|\#|/)"""
    r"""(?P<target>[^)\s"]+)"""
    r"""|`[^`\n]*`""",
    re.MULTILINE | re.DOTALL,
)


def with_absolute_links(text: str, source: str, tag: str) -> str:
    """Replace the relative links of a Markdown text by links to a tag of the repository.

    Args:
        text: a page in the root folder of the repository.
        source: the address of the repository, without a slash at its end.
        tag: the tag of the version, "v0.1.0".
    """

    def absolute(match: re.Match[str]) -> str:
        if match["target"] is None:
            return match[0]
        is_image = match["image"] or match["attribute"] == "src"
        kind = "raw" if is_image else "blob"  # "blob" also works for folders
        return f"{match['before']}{source}/{kind}/{tag}/{match['target']}"

    return LINK.sub(absolute, text)


def links(source: str, tag: str) -> dict[str, str]:
    """The project URLs of the package."""
    return {
        "Source": source,
        "Documentation": f"{source}/blob/{tag}/docs/index.md",
        "Changelog": f"{source}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{source}/issues",
    }


class Provider:
    """The hook that scikit-build-core calls, after the one of wheel_metadata.py."""

    def dynamic_metadata(
        self, settings: Mapping[str, Any], project: Mapping[str, Any]
    ) -> dict[str, Any]:
        text = Path("README.md").read_text(encoding="utf-8")
        source = os.environ.get("APEX_SOURCE_URL", "").rstrip("/")
        tag = "v" + project["version"].partition("+")[0]
        if source:
            text = with_absolute_links(text, source, tag)
        return {
            "readme": {"content-type": "text/markdown", "text": text},
            "urls": links(source, tag) if source else {},
        }
