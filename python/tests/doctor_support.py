# SPDX-License-Identifier: BSD-3-Clause
"""Facts of ranks without findings, and cases of such ranks, for the tests of apex.doctor."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from apex._doctor import facts, measure, network
from apex._doctor.case import Case

GIB = 1 << 30


def a_rank(rank: int = 0, host: str = "a", **changes: Any) -> facts.Facts:
    """One rank of a host with four cores.

    ``changes`` are new parts, or values within a part, as in ``limits={"open_files": 9}``. Each
    host has its own boot and namespaces, and the address 10.0.0.<letter of the host>.
    """
    address = f"10.0.0.{ord(host[0])}"
    one = facts.Facts(
        place=facts.Place(rank, host, f"boot of {host}", "pid:[1]", f"net of {host}"),
        build=facts.Build(
            *("0.1.0", "2.13.0", "3.11.7", "2.13.0", "GNU 12.2.0", True),
            *(None, False, "this libtorch is a CPU build", False, "the CUDA parts are off"),
        ),
        gpus=facts.Gpus(0, ()),
        processors=facts.Processors(4, (0, 1, 2, 3), None, 2, "AVX2", None, 0.5),
        memory=facts.Memory(16 * GIB, 12 * GIB, None, 0, 8 * GIB),
        limits=facts.Limits(1024, 4096, None),
        cards=(network.Card("lo", ("127.0.0.1",)), network.Card("eth0", (address,), True, 1000)),
        gloo=network.GlooChoice("host name", (network.GlooCard("eth0", address),)),
        variables={"OMP_NUM_THREADS": "2"},
        is_torchrun=True,
    )
    for part, change in changes.items():
        value = getattr(one, part)
        if dataclasses.is_dataclass(value) and isinstance(change, dict):
            change = dataclasses.replace(value, **change)
        one = dataclasses.replace(one, **{part: change})
    return one


def a_container(number: int, **changes: Any) -> facts.Facts:
    """A rank that is alone in a container of host a."""
    return a_rank(number, place={"processes": f"pid:[{number}]"}, **changes)


def a_case(*ranks: facts.Facts, **measured: Any) -> Case:
    return Case(ranks or (a_rank(),), **measured)


def two(**changes: Any) -> Case:
    """Two ranks of one host with these changes."""
    return a_case(a_rank(0, **changes), a_rank(1, **changes))


def hosts(**changes: Any) -> Case:
    """Two hosts with one rank each. The changes apply to rank 1."""
    return a_case(a_rank(0), a_rank(1, "b", **changes))


def all_reduces(apex_s: float, gloo_s: float, shares: bool = True) -> list[measure.AllReduce]:
    return [
        measure.AllReduce("gloo", gloo_s, 1e9),
        measure.AllReduce("apex", apex_s, 2e9, shares),
    ]


def in_order(parts: list[str], text: str) -> bool:
    """Whether ``text`` contains all parts in this order."""
    return re.search(".*".join(map(re.escape, parts)), text) is not None
