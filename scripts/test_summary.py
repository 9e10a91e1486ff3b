# SPDX-License-Identifier: BSD-3-Clause
"""Adds up the results of CTest, GoogleTest and pytest in a folder and prints them as one line.

CTest has one entry per GoogleTest executable. If an executable wrote its own results, NAME.xml,
these are counted instead of the entry.
"""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path


def outcomes(file: Path) -> dict[str, list[str]]:
    """Outcomes ("passed", "failed", "skipped") of the test cases in a file, by name."""
    result: dict[str, list[str]] = {}
    for case in ET.parse(file).getroot().iter("testcase"):
        state = case.get("status")
        if case.find("failure") is not None or case.find("error") is not None or state == "fail":
            outcome = "failed"
        elif (
            case.find("skipped") is not None
            or case.get("result") in ("skipped", "suppressed")
            or state in ("notrun", "disabled")
        ):
            outcome = "skipped"
        else:
            outcome = "passed"
        name = f"{case.get('classname')}::{case.get('name')}"
        result.setdefault(name, []).append(outcome)
    return result


def all_outcomes(folder: Path) -> dict[str, list[str]]:
    """The outcomes of all tests with results in the folder, by name."""
    result: dict[str, list[str]] = {}

    def add(found: dict[str, list[str]]) -> None:
        for name, states in found.items():  # one source may be in several executables
            result.setdefault(name, []).extend(states)

    ctest = folder / "ctest.xml"  # not there with APEX_TEST_CPP=OFF
    for name, states in outcomes(ctest).items() if ctest.exists() else ():
        own = folder / f"{name.split('::')[-1]}.xml"
        if not own.exists():
            add({name: states})
            continue
        inner = outcomes(own)
        add(inner)
        if "failed" in states and not any("failed" in found for found in inner.values()):
            add({f"{name}, after or between its tests": ["failed"]})
    pytest = folder / "pytest.xml"
    add(outcomes(pytest) if pytest.exists() else {"pytest, which left no results": ["failed"]})
    return result


def count(folder: Path) -> Counter[str]:
    return Counter(state for states in all_outcomes(folder).values() for state in states)


def failures(folder: Path) -> list[str]:
    return [name for name, states in all_outcomes(folder).items() if "failed" in states]


def main(folder: Path) -> int:
    counts = count(folder)
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 0 if counts["passed"] and not counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
