# SPDX-License-Identifier: BSD-3-Clause
"""Rules that derive recommendations from facts and measurements. Pure functions.

A rule takes a :class:`apex._doctor.case.Case` and returns a recommendation or None. RULES lists the
rules by importance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from apex._check import REBUILD
from apex._doctor.case import Case, Recommendation, ranks_text
from apex._doctor.facts import Facts
from apex._doctor.network import Card, is_loopback

MOST = 5
_MIB = 1 << 20


def recommend(case: Case, most: int = MOST) -> list[Recommendation]:
    """The most important recommendations, most important first."""
    found = [rule(case) for rule in RULES]
    return [one for one in found if one is not None][:most]


# --- the rules; the name of a rule appears in the JSON output ---


def failed_self_test(case: Case) -> Recommendation | None:
    failed = [test for test in case.self_tests if not test.has_passed]
    if not failed:
        return None
    found = ", ".join(dict.fromkeys(f"{test.dtype} on {test.device}" for test in failed))
    if case.is_job:
        found += f" ({ranks_text({test.rank for test in failed})})"
    variable = "APEX_SYNC_BATCH_NORM=aten uses torch's operators instead"
    if all(test.device == "cpu" for test in failed):
        variable = "ATEN_CPU_CAPABILITY=default takes another implementation"
    return Recommendation(
        "failed_self_test",
        f"batch norm is wrong for {found}",
        f"{variable}; report it with this output",
    )


def no_such_card(case: Case) -> Recommendation | None:
    broken = [facts for facts in case.ranks if any(c.address is None for c in facts.gloo.cards)]
    if not broken:
        return None
    facts = broken[0]
    names = [str(card.name) for card in facts.gloo.cards if card.address is None]
    return Recommendation(
        "no_such_card",
        f"GLOO_SOCKET_IFNAME names {', '.join(names)}{case.on(broken)}, but no network card of "
        "that name has an address, so Gloo fails",
        f"name a card with an address ({_cards_text(facts.cards)}), or unset the variable",
    )


def loopback_between_hosts(case: Case) -> Recommendation | None:
    """A rank of another host would connect to its own host instead."""
    if len({(f.place.boot, f.place.addresses) for f in case.ranks}) < 2:
        return None
    bound = [
        f for f in case.ranks if any(c.address and is_loopback(c.address) for c in f.gloo.cards)
    ]
    if not bound:
        return None
    facts = bound[0]
    why = {
        "host name": f"to which the host name {facts.place.host} resolves",
        "no address": f"because the host name {facts.place.host} has no address of this host",
    }.get(facts.gloo.why, "which GLOO_SOCKET_IFNAME names")
    return Recommendation(
        "loopback_between_hosts",
        f"Gloo takes the loopback address {facts.gloo.cards[0].address}{case.on(bound)}, {why}, so "
        "ranks of other hosts cannot connect",
        f"set GLOO_SOCKET_IFNAME to the card that connects the hosts ({_cards_text(facts.cards)}), "
        "or correct /etc/hosts",
    )


def same_address_on_two_hosts(case: Case) -> Recommendation | None:
    owners: dict[str, dict[tuple[str, str], Facts]] = {}
    for facts in case.ranks:
        for card in facts.gloo.cards:
            if card.address is not None and not is_loopback(card.address):
                network = facts.place.boot, facts.place.addresses
                owners.setdefault(card.address, {}).setdefault(network, facts)
    for address, hosts in owners.items():
        if len(hosts) > 1:
            ranks = ranks_text(facts.place.rank for facts in hosts.values())
            return Recommendation(
                "same_address_on_two_hosts",
                f"Gloo takes the same address {address} on the hosts of {ranks}, so they cannot "
                "connect; it may be that of a bridge for containers",
                "set GLOO_SOCKET_IFNAME to the card that connects the hosts",
            )
    return None


def different_versions(case: Case) -> Recommendation | None:
    def versions(facts: Facts) -> dict[str, str]:
        build = facts.build
        return {
            "torch": build.torch,
            "apex": build.apex,
            "Python": build.python,
            "the torch that apex was built for": build.built_for,
            "CUDA parts": "ON" if build.with_cuda else "OFF",
        }

    remedy = "install the same environment on all hosts"
    return _different("different_versions", case, versions, remedy)


def different_variables(case: Case) -> Recommendation | None:
    remedy = "start all ranks with the same environment variables"
    return _different("different_variables", case, lambda facts: facts.variables, remedy)


def _different(
    rule: str, case: Case, values_of: Callable[[Facts], Mapping[str, str]], remedy: str
) -> Recommendation | None:
    values = {facts.place.rank: values_of(facts) for facts in case.ranks}
    phrases = []
    for name in dict.fromkeys(name for of_rank in values.values() for name in of_rank):
        having: dict[str | None, list[int]] = {}
        for rank, of_rank in values.items():
            having.setdefault(of_rank.get(name), []).append(rank)
        if len(having) > 1:
            # The value with the fewest ranks comes first, because it is likely to be the wrong one.
            groups = sorted(having.items(), key=lambda item: (len(item[1]), item[1]))
            groups_text = ", ".join(f"{_short(value)} on {ranks_text(r)}" for value, r in groups)
            phrases.append(f"{name} ({groups_text})")
    if not phrases:
        return None
    return Recommendation(rule, f"ranks differ in {', '.join(phrases)}", remedy)


def _short(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if len(value) <= 40 else f"{value[:37]}..."


def unused_gpus(case: Case) -> Recommendation | None:
    """Reports the first host with unused GPUs."""
    for facts in case.ranks:
        gpus, build = facts.gpus, facts.build
        present = max(gpus.device_files, len(gpus.names))
        if present and build.torch_cuda is None:
            finding = f"this torch is a CPU build{case.on_host(facts)}, and there are GPUs"
            remedy = f"install torch for CUDA, then rebuild apex: {REBUILD}"
        elif present and not gpus.names:
            finding = f"torch sees no GPU{case.on_host(facts)}, and there are {present}"
            remedy = "check CUDA_VISIBLE_DEVICES, and the driver's version in nvidia-smi"
        elif present and not build.with_cuda:
            finding = f"apex has no CUDA parts{case.on_host(facts)} ({build.cuda_reason})"
            remedy = f"install nvcc of CUDA {build.torch_cuda}, then {REBUILD}"
        else:
            continue
        return Recommendation("unused_gpus", finding, remedy)
    return None


def slow_link(case: Case) -> Recommendation | None:
    own = case.ranks[0].processors
    if not case.slow or (len(case.hosts) == 1 and own.load > own.online):
        return None  # on a busy host, the pair had to wait for a core
    name = {facts.place.rank: f"rank {facts.place.rank}" for facts in case.ranks}
    if len(case.hosts) > 1:
        name = {f.place.rank: f"rank {f.place.rank} (host {f.place.host})" for f in case.ranks}
    phrases = []
    for found in case.slow:
        who = " and ".join(name[rank] for rank in found.ranks)
        who += " and all others" if len(found.ranks) == 1 else ""
        if found.quantity == "bandwidth":
            values = f"{found.value / 1e9:.2g} GB/s; the median is {found.median / 1e9:.2g}"
        else:
            values = f"{found.value * 1e6:.0f} us; the median is {found.median * 1e6:.0f}"
        phrases.append(f"between {who} the {found.quantity} is {values}")
    remedy = "find the programs that use these cores"
    if len(case.hosts) > 1:
        remedy = "check the cards, cables and switches between these hosts, and their load"
    return Recommendation("slow_link", ", and ".join(phrases), remedy)


#: Remedies by a part of the reason. All but the first come from cpp/src/comm/host_memory.cpp.
NOT_SHARED_REMEDIES = {
    "APEX_HOST_CHANNEL=0": "unset the variable",
    "ulimit -f": "raise the limit of file sizes, ulimit -f unlimited",
    "memfd_create": "allow the system call memfd_create in the container's seccomp profile",
    "/proc/": "start all ranks of the host as one user, in one container",
}


def memory_not_shared(case: Case) -> Recommendation | None:
    reason = case.not_shared
    if reason is None:
        return None
    remedies = [text for part, text in NOT_SHARED_REMEDIES.items() if part in reason]
    remedy = remedies[0] if remedies else "correct that"
    return Recommendation(
        "memory_not_shared",
        "ranks of this host do not share memory, so every collective uses Gloo's sockets "
        f"({reason})",
        f"{remedy} (docs/backend.md)",
    )


def several_containers(case: Case) -> Recommendation | None:
    for ranks in case.machines:
        containers = {facts.place.processes: facts for facts in reversed(ranks)}
        if len(containers) > 1:
            some = ranks_text(facts.place.rank for facts in containers.values())
            return Recommendation(
                "several_containers",
                f"{some} run on one machine in different containers, so they cannot share memory",
                "start all ranks of a machine in one container",
            )
    return None


def too_many_threads(case: Case) -> Recommendation | None:
    for ranks in case.machines:
        cores = _cores(ranks)
        threads = sum(facts.processors.threads for facts in ranks)
        if threads > max(cores, len(ranks)):  # with one thread each, too_many_ranks applies
            has = f"{len(ranks)} processes have" if len(ranks) > 1 else "a process has"
            return Recommendation(
                "too_many_threads",
                f"{has} {threads} threads for {_cores_text(cores)}{case.on_host(ranks[0])}",
                f"set OMP_NUM_THREADS={max(1, cores // len(ranks))}",
            )
    return None


def too_many_ranks(case: Case) -> Recommendation | None:
    for ranks in case.machines:
        cores = _cores(ranks)
        if len(ranks) > cores:
            return Recommendation(
                "too_many_ranks",
                f"{len(ranks)} ranks share {_cores_text(cores)}{case.on_host(ranks[0])}",
                "start fewer ranks there, or give them more cores (affinity, CPU limit of the "
                "container)",
            )
    return None


def too_few_threads(case: Case) -> Recommendation | None:
    """torchrun sets OMP_NUM_THREADS=1, which is right for training on GPUs."""
    for ranks in case.machines:
        share = _cores(ranks) // len(ranks)
        single = all(facts.processors.threads == 1 for facts in ranks)
        if case.is_job and single and share > 1 and not any(f.gpus.names for f in ranks):
            sets = ", which torchrun sets to 1" if ranks[0].is_torchrun else ""
            return Recommendation(
                "too_few_threads",
                f"each process has one thread for {share} cores{case.on_host(ranks[0])}",
                f"for training on CPUs set OMP_NUM_THREADS={share}{sets}",
            )
    return None


def too_few_files(case: Case) -> Recommendation | None:
    """Gloo connects each rank to every other, for the world and for each further group."""
    needed = 256 + 4 * len(case.ranks)
    low = [f for f in case.ranks if f.limits.open_files is not None]
    low = [f for f in low if (f.limits.open_files or 0) < needed]
    if not low:
        return None
    most = low[0].limits.most_open_files
    can = most is None or most >= needed
    return Recommendation(
        "too_few_files",
        f"a process may open {low[0].limits.open_files} files{case.on(low)}, and each Gloo group "
        "opens one for every other rank",
        f"ulimit -n {needed} before the start"
        + ("" if can else f" (the hard limit is {most}, which root can raise)"),
    )


def little_memory(case: Case) -> Recommendation | None:
    for facts in case.ranks:
        memory = facts.memory
        total = memory.limit or memory.total
        short = memory.available < max(512 * _MIB, total // 20)
        if short or (memory.swap_used > 256 * _MIB and memory.available < total // 4):
            swap = f", and {_gib(memory.swap_used)} are swapped out" if memory.swap_used else ""
            return Recommendation(
                "little_memory",
                f"{_gib(memory.available)} of {_gib(total)} of memory are available"
                f"{case.on_host(facts)}{swap}",
                "end other programs, or raise the memory limit of the container"
                if memory.limit
                else "end other programs, or start fewer ranks there",
            )
    return None


def small_shm(case: Case) -> Recommendation | None:
    """Docker gives a container 64 MiB by default."""
    small = [f for f in case.ranks if f.memory.shm is not None and f.memory.shm < 256 * _MIB]
    if not small:
        return None
    return Recommendation(
        "small_shm",
        f"/dev/shm has {(small[0].memory.shm or 0) // _MIB} MiB{case.on(small)}, through which "
        "workers of a DataLoader send batches",
        "docker run --shm-size=8g, or --ipc=host",
    )


def busy_host(case: Case) -> Recommendation | None:
    for facts in case.ranks:
        if _is_busy(case, facts):
            return Recommendation(
                "busy_host",
                f"{facts.processors.load:.1f} processes were running or waiting in the last minute "
                f"on {_cores_text(facts.processors.online)}{case.on_host(facts)}",
                "end other programs, and measure again",
            )
    return None


def _is_busy(case: Case, facts: Facts) -> bool:
    """Whether other programs use the cores. Ranks of the job do not count: they have just started
    and are importing torch."""
    own = len(case.hosts[facts.place.key]) if case.is_job else 0
    return facts.processors.load > facts.processors.online + own


def faster_card(case: Case) -> Recommendation | None:
    if len(case.hosts) < 2:
        return None
    for facts in case.ranks:
        speeds = {card.name: card.speed_mbit for card in facts.cards}
        taken = [speeds.get(card.name or "") for card in facts.gloo.cards]
        own = min((speed for speed in taken if speed is not None), default=None)
        usable = [card for card in facts.cards if card.is_up and card.addresses]
        best = max(usable, key=lambda card: card.speed_mbit or 0, default=None)
        if own is not None and best is not None and (best.speed_mbit or 0) > own:
            name = facts.gloo.cards[0].name
            return Recommendation(
                "faster_card",
                f"Gloo takes {name}, of {own / 1000:g} Gbit/s{case.on_host(facts)}, and "
                f"{best.name} has {(best.speed_mbit or 0) / 1000:g} Gbit/s",
                f"GLOO_SOCKET_IFNAME={best.name}, if it connects the hosts",
            )
    return None


def low_frequency(case: Case) -> Recommendation | None:
    low = [facts for facts in case.ranks if facts.processors.governor == "powersave"]
    if not low:
        return None
    return Recommendation(
        "low_frequency",
        f"the frequency governor powersave keeps cores at their lowest frequency{case.on(low)}",
        "cpupower frequency-set -g performance, as root",
    )


def slower_than_gloo(case: Case) -> Recommendation | None:
    by_backend = {one.backend: one for one in case.measured}
    apex, gloo = by_backend.get("apex"), by_backend.get("gloo")
    if apex is None or gloo is None or not apex.shares_memory:
        return None
    if any(_is_busy(case, facts) for facts in case.ranks):
        return None  # a busy host makes the measurements unreliable
    if apex.latency_s < 1.25 * gloo.latency_s and apex.bytes_per_s > gloo.bytes_per_s / 1.25:
        return None
    return Recommendation(
        "slower_than_gloo",
        "an all-reduce in shared memory takes longer here than over Gloo",
        "set APEX_HOST_CHANNEL=0, and report it with this output",
    )


#: If one of these rules applies, a Gloo group of all ranks cannot be created.
PREVENTS_GLOO = (no_such_card, loopback_between_hosts, same_address_on_two_hosts)

RULES: tuple[Callable[[Case], Recommendation | None], ...] = (
    failed_self_test,
    no_such_card,
    loopback_between_hosts,
    same_address_on_two_hosts,
    different_versions,
    unused_gpus,
    slow_link,
    too_few_files,
    different_variables,
    memory_not_shared,
    too_many_threads,
    too_many_ranks,
    little_memory,
    several_containers,
    faster_card,
    busy_host,
    too_few_threads,
    low_frequency,
    slower_than_gloo,
    small_shm,
)


def _cores(ranks: Sequence[Facts]) -> int:
    """The cores that the ranks of one machine may use together: whole cores, at least one."""
    of_container: dict[str, float] = {}
    for facts in ranks:
        quota = facts.processors.quota
        of_container[facts.place.processes] = math.inf if quota is None else quota
    together = len({core for facts in ranks for core in facts.processors.affinity})
    return max(1, int(min(together, sum(of_container.values()))))


def _cores_text(cores: int) -> str:
    return "1 core" if cores == 1 else f"{cores} cores"


def _cards_text(cards: Sequence[Card]) -> str:
    others = [card for card in cards if card.addresses and not card.is_loopback]
    return ", ".join(f"{card.name} {card.addresses[0]}" for card in others) or "there is none"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
