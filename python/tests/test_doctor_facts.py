# SPDX-License-Identifier: BSD-3-Clause
"""Facts of this host: the interface that Gloo uses, cgroups, variables."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from doctor_support import GIB, a_case

from apex._doctor import facts, network, report

# --- the network interface that Gloo uses ---

CARDS = (
    network.Card("lo", ("127.0.0.1", "::1")),
    network.Card("eth0", ("192.0.2.1", "192.0.2.9", "fd00::1")),
    network.Card("ib0", ("fd00::2",)),
    network.Card("down", ()),
)


@pytest.mark.parametrize(
    ("variable", "usable", "why", "taken"),
    [
        ("", ["192.0.2.9"], "host name", [("eth0", "192.0.2.9")]),
        ("", ["127.0.1.1"], "host name", [("lo", "127.0.1.1")]),  # Debian's /etc/hosts
        ("", ["203.0.113.5"], "host name", [(None, "203.0.113.5")]),
        ("", [], "no address", [("lo", "127.0.0.1")]),
        ("eth0", ["127.0.0.1"], "GLOO_SOCKET_IFNAME", [("eth0", "192.0.2.1")]),
        ("ib0,eth0", [], "GLOO_SOCKET_IFNAME", [("ib0", "fd00::2"), ("eth0", "192.0.2.1")]),
        ("eth9,down", [], "GLOO_SOCKET_IFNAME", [("eth9", None), ("down", None)]),
    ],
)
def test_choose_gloo_card_as_torch_does(
    variable: str, usable: list[str], why: str, taken: list[tuple[str | None, str | None]]
) -> None:
    choice = network.choose(CARDS, variable, usable)
    assert choice.why == why
    assert [(card.name, card.address) for card in choice.cards] == taken


def listening_addresses() -> set[str]:
    """The IPv4 addresses of this process's listening sockets."""
    own = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            own.add(os.readlink(link))
    addresses = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            number = bytes.fromhex(fields[1].partition(":")[0])
            addresses.add(".".join(str(part) for part in reversed(number)))
    return addresses


@pytest.mark.parametrize("variable", ["", "x", "lo", "other"])
def test_gloo_binds_to_the_address_that_is_named(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = network.read_cards()
    if variable == "other":
        found = [card.name for card in cards if card.addresses and not card.is_loopback]
        if not found:
            pytest.skip("the loopback device is the only card with an address here")
        variable = found[0]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", variable)
    (card,) = facts.gather(os.environ).gloo.cards
    assert card.address is not None
    if ":" in card.address:
        pytest.skip("Gloo takes an IPv6 address here")
    before = listening_addresses()
    timeout = datetime.timedelta(seconds=20)
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout)
    assert listening_addresses() - before == {card.address}
    del group


def test_usable_addresses_are_those_of_this_host() -> None:
    assert "127.0.0.1" in network.usable_addresses("localhost")
    # belongs to no host: reserved for documentation
    assert network.usable_addresses("192.0.2.77") == ()
    assert network.usable_addresses("no such host") == ()


# --- facts ---


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/job/step\n"}
V1 = {"proc/self/cgroup": "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n"}
V1_CPU = "sys/fs/cgroup/cpu,cpuacct/docker/x"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2, None),
        (V2 | {"sys/fs/cgroup/job/step/cpu.max": "max 100000\n"}, None),
        (V2 | {"sys/fs/cgroup/job/step/cpu.max": "150000 100000\n"}, 1.5),
        (
            V2
            | {
                "sys/fs/cgroup/job/step/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/job/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        # In a container, its own cgroup is mounted as the root.
        (V2 | {"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0),
        (V1 | {f"{V1_CPU}/cpu.cfs_quota_us": "-1", f"{V1_CPU}/cpu.cfs_period_us": "100"}, None),
        (V1 | {f"{V1_CPU}/cpu.cfs_quota_us": "250", f"{V1_CPU}/cpu.cfs_period_us": "100"}, 2.5),
    ],
)
def test_cpu_quota_of_control_groups(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    assert facts.cpu_quota(write_tree(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        (V2, (None, None)),
        (V2 | {"sys/fs/cgroup/job/memory.max": "max\n"}, (None, None)),
        (
            V2
            | {
                "sys/fs/cgroup/job/memory.max": "1000\n",
                "sys/fs/cgroup/job/memory.current": "900\n",
                "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 300\n",
            },
            (1000, 400),
        ),
        (
            V1
            | {
                "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "500",
                "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": "100",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
            },
            (500, 400),
        ),
    ],
)
def test_memory_limit_of_control_groups(
    tmp_path: Path, files: dict[str, str], limit: tuple[int | None, int | None]
) -> None:
    assert facts.memory_limit(write_tree(tmp_path, files)) == limit


def test_shared_variables_leave_out_what_belongs_to_a_host_and_secrets() -> None:
    kept = {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring", "APEX_HOST_CHANNEL": "0", "LD_PRELOAD": ""}
    kept |= {"NCCL_IB_PKEY": "1"}
    others = {
        "RANK": "1",
        "PATH": "/bin",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "CUDA_VISIBLE_DEVICES": "1",
        "GOMP_CPU_AFFINITY": "0-3",
        "TORCHELASTIC_ERROR_FILE": "/tmp/1",
        "NVIDIA_API_KEY": "nvapi-1",
        "TORCH_HUB_TOKEN": "2",
        "APEX_DB_PASSWORD": "3",
        "MKL_LICENSE_FILE": "4",
        "NCCL_auth": "5",
        "PYTORCH_PROXY": "http://me:6@proxy",
    }
    assert facts.shared_variables(kept | others) == kept


def test_gather_facts_of_this_process() -> None:
    found = facts.gather({"RANK": "3"})
    assert found.place.rank == 3
    assert found.build.torch == torch.__version__
    assert set(found.processors.affinity) == os.sched_getaffinity(0)
    assert GIB // 4 < found.memory.available <= found.memory.total
    assert found.limits.open_files in (None, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    assert "127.0.0.1" in [address for card in found.cards for address in card.addresses]
    json.dumps(report.as_json(report.make(a_case(found), (), ())), allow_nan=False)
