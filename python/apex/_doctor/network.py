# SPDX-License-Identifier: BSD-3-Clause
"""The network interfaces of this host, and the ones that Gloo uses.

torch's Gloo uses the interfaces that ``GLOO_SOCKET_IFNAME`` names, with the first address of each.
If the variable is not set, it uses the first address of the host name that it can bind a socket to.
If there is none, it uses 127.0.0.1 (``ProcessGroupGloo::createDefaultDevice``).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_MOST_ADDRESSES = 1024


@dataclass(frozen=True)
class Card:
    """A network interface.

    Attributes:
        name: as in ``GLOO_SOCKET_IFNAME``.
        addresses: IPv4 before IPv6, the order in which Gloo tries them.
        speed_mbit: the speed that the driver reports; None if it reports none.
    """

    name: str
    addresses: tuple[str, ...]
    is_up: bool = True
    speed_mbit: int | None = None

    @property
    def is_loopback(self) -> bool:
        return bool(self.addresses) and all(map(is_loopback, self.addresses))


@dataclass(frozen=True)
class GlooCard:
    """An interface that Gloo uses.

    Attributes:
        name: None if no interface has the address.
        address: None if no interface has that name, or if it has no address. Gloo raises then.
    """

    name: str | None
    address: str | None


@dataclass(frozen=True)
class GlooChoice:
    """The interfaces that Gloo uses, and how it chose them.

    Attributes:
        why: ``"GLOO_SOCKET_IFNAME"``, ``"host name"``, or ``"no address"`` if the host name
        resolves
            to no address of this host.
        cards: several only if ``GLOO_SOCKET_IFNAME`` names several.
    """

    why: str
    cards: tuple[GlooCard, ...]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def choose(cards: Sequence[Card], variable: str, usable: Sequence[str]) -> GlooChoice:
    """The interfaces that Gloo would use.

    Args:
        variable: the value of ``GLOO_SOCKET_IFNAME``, or ``""``.
        usable: the addresses of the host name that a socket can bind to, in resolver order.
    """
    if len(variable) > 1:  # Gloo ignores a name of one letter
        by_name = {card.name: card for card in cards}
        taken = []
        for name in variable.split(","):
            addresses = by_name[name].addresses if name in by_name else ()
            taken.append(GlooCard(name, addresses[0] if addresses else None))
        return GlooChoice("GLOO_SOCKET_IFNAME", tuple(taken))
    address = usable[0] if usable else LOOPBACK
    having = [card.name for card in cards if address in card.addresses]
    if not having and is_loopback(address):
        having = [card.name for card in cards if card.is_loopback]
    card = GlooCard(having[0] if having else None, address)
    return GlooChoice("host name" if usable else "no address", (card,))


def usable_addresses(host_name: str) -> tuple[str, ...]:
    """Addresses of ``host_name`` that belong to this host. The resolver may block."""
    try:
        found = socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    usable = []
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
            usable.append(str(address[0]).partition("%")[0])
    return tuple(dict.fromkeys(usable))


def read_cards() -> tuple[Card, ...]:
    addresses: dict[str, list[str]] = {}
    for name, address in [*_ipv4(), *_ipv6()]:
        addresses.setdefault(name, []).append(address)
    folder = Path("/sys/class/net")
    names = [name for _, name in socket.if_nameindex()]
    return tuple(
        Card(
            name,
            tuple(addresses.get(name, ())),
            bool((_number(folder / name / "flags") or 0) & 1),  # IFF_UP
            _positive(_number(folder / name / "speed")),
        )
        for name in names
    )


def _ipv4() -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        (length, _) = struct.unpack("iP", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))
    entries = [buffer[at : at + _IFREQ_BYTES].tobytes() for at in range(0, length, _IFREQ_BYTES)]
    return [
        # A second address may have a label, as in "eth0:1".
        (os.fsdecode(entry[:16].split(b"\0")[0]).partition(":")[0], socket.inet_ntoa(entry[20:24]))
        for entry in entries
    ]


def _ipv6() -> list[tuple[str, str]]:
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        fields = [line.split() for line in lines]
        return [(f[5], str(ipaddress.IPv6Address(bytes.fromhex(f[0])))) for f in fields]
    return []


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(), 0)
    return None


def _positive(value: int | None) -> int | None:
    return value if value is not None and value > 0 else None
