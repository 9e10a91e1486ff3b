"""Adds up the results of CTest, GoogleTest and pytest in a folder and prints them as one line.

CTest has one entry per GoogleTest executable; where such an executable left its own results,
NAME.xml, these are counted in its place.
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


def main(folder: Path) -> int:
    counts: Counter[str] = Counter()
    for name, states in outcomes(folder / "ctest.xml").items():
        own = folder / f"{name.split('::')[-1]}.xml"
        if not own.exists():
            counts.update(states)
            continue
        inner = [state for found in outcomes(own).values() for state in found]
        counts.update(inner)
        if "failed" in states and "failed" not in inner:
            counts["failed"] += 1  # it ended badly after, or between, its tests
    pytest = folder / "pytest.xml"
    if pytest.exists():
        for states in outcomes(pytest).values():
            counts.update(states)
    else:
        counts["failed"] += 1
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 0 if counts["passed"] and not counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
