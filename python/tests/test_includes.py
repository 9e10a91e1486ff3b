# SPDX-License-Identifier: BSD-3-Clause
"""Parts of the C++ library include only the parts below them, as docs/design.md draws them."""

from __future__ import annotations

import re
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "cpp" / "src"

#: By folder of cpp/src: the folders and headers whose headers it may include. A header outside of
#: folders is below all parts.
BELOW = {
    "watch": ["distributed/backends.h"],
    "transport": ["watch/process_state.h", "distributed/backends.h"],
    "comm": ["transport", "watch", "distributed/backends.h"],
    "distributed": ["comm", "transport", "watch"],
}


def test_parts_include_only_parts_below_them() -> None:
    wrong, seen = [], 0
    for part, below in BELOW.items():
        for source in sorted((SOURCES / part).iterdir()):
            if source.suffix not in (".h", ".cpp"):
                continue
            for header in re.findall(r'^#include "([^"]+)"', source.read_text(), re.M):
                folder, _, name = header.partition("/")
                if not name or folder == part:
                    continue
                seen += 1
                if folder not in below and header not in below:
                    wrong.append(f"{part}/{source.name}: {header}")
    assert not wrong, wrong
    assert seen > 30


def test_headers_outside_of_parts_include_no_part() -> None:
    for header in SOURCES.glob("*.h"):
        assert not re.search(r'^#include "\w+/', header.read_text(), re.M), header.name
