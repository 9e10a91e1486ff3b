# SPDX-License-Identifier: BSD-3-Clause
"""A short version of the campaign, without the faults that need separate hosts."""

from __future__ import annotations

import pytest
from campaign import complaints, run
from cases import GOOD, Case, cases

pytestmark = [pytest.mark.processes, pytest.mark.nightly]

# Each moment once, and each fault where it differs most from the other ranks' operation.
CHOSEN = [
    ("plain", "before construction", "stopped", 2, 0),
    ("plain", "in construction", "killed", 3, 1),
    ("plain", "first gradient", "exception, caught", 3, 1),
    ("plain", "between launches", "stopped", 3, 1),
    ("plain", "between launches", "killed", 3, 0),
    ("plain", "last gradient", "stopped for 5 s", 2, 1),
    ("plain", "before optimizer step", "sockets shut", 3, 1),
    ("plain", "exit", "exits", 3, 1),
    ("buffers", "before broadcast", "killed", 3, 1),
    ("python hook", "in the hook", "stopped", 2, 1),
    ("built-in hook", "between launches", "group closed", 2, 1),
    ("batch norm", "before forward", "stopped", 3, 1),
    ("batch norm", "before backward", "exception, caught", 3, 1),
    ("join", "with data", "killed", 3, 0),
    ("join", "with data", "group closed", 3, 1),
    ("join", "shadowing", "exits", 3, 2),
    ("amp", "inside scale_loss", "killed", 2, 0),
    ("plain", "between launches", "late", 4, 3),
    ("batch norm", "before forward", "late", 2, 1),
]


def test_faults_survivors_name_operation_and_culprit() -> None:
    chosen = [Case(*case, "apex") for case in CHOSEN]
    assert set(chosen) <= set(cases("apex", [2, 3, 4]))
    # Few at a time: some cases depend on times, and other tests run beside them.
    outcomes = run(chosen, at_once=3, verbose=False)
    wrong = {
        str(case): (o.verdict, o.said) for case, o in outcomes.items() if o.verdict not in GOOD
    }
    assert not wrong
    assert len(outcomes) == len(chosen)


def test_complaints_find_what_an_error_lacks() -> None:
    case = Case("plain", "forward", "killed", 3, 1, "apex")
    good = (
        "rank 0 of 3: all-reduce of bucket 1 (parameter 'a', 3 elements), failed; rank 1 has ended"
    )
    assert complaints(case, 0, good) == []
    assert complaints(case, 0, good.replace("rank 1", "rank 2")) == [
        "blames rank [2]",
    ]
    assert complaints(case, 0, good.split("; rank 1")[0]) == ["does not name the culprit"]
    assert complaints(case, 0, good.replace("all-reduce", "work")) == [
        "the error does not name the operation"
    ]
    assert complaints(case, 2, good) != []
