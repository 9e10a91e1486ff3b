# SPDX-License-Identifier: BSD-3-Clause
"""A link with a rate and a delay in user space, for kernels without netem. Used by netns.sh.

    python benchmarks/delayed_link.py DEVICE_A DEVICE_B --mbit 200 --delay-ms 1 [--mtu 9000]

Creates two TUN devices, which the caller moves into two network namespaces, and forwards packets
between them until SIGTERM. A packet leaves when the packets before it have left at the given rate,
and arrives after the delay. A packet that would wait longer than 50 ms to leave is dropped, as by
tc's tbf. Unlike a real link, this one uses CPU time that the ranks could use: about a seventh of a
core with jumbo frames at 200 Mbit/s in both directions. The share is printed at the end.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import os
import resource
import select
import signal
import struct
import time

TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
QUEUE_S = 0.05
FRAME_BYTES = 14  # an Ethernet header, which a TUN device does not carry


def open_tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


class Direction:
    """Packets in flight from one device to the other."""

    def __init__(self, source: int, target: int, bytes_per_s: float, delay_s: float) -> None:
        self.source, self.target = source, target
        self.bytes_per_s, self.delay_s = bytes_per_s, delay_s
        self.on_the_way: collections.deque[tuple[float, bytes]] = collections.deque()
        self.last_leaves = 0.0
        self.carried = self.dropped = 0

    def take(self, mtu: int) -> None:
        """Read the available packets."""
        while True:
            try:
                packet = os.read(self.source, mtu)
            except (BlockingIOError, OSError):  # no more packets, or the device is down
                return
            now = time.monotonic()
            begins = max(now, self.last_leaves)
            if begins - now > QUEUE_S:
                self.dropped += 1
                continue
            self.last_leaves = begins + (len(packet) + FRAME_BYTES) / self.bytes_per_s
            self.on_the_way.append((self.last_leaves + self.delay_s, packet))

    def deliver(self) -> None:
        """Write the packets that have arrived."""
        while self.on_the_way and self.on_the_way[0][0] <= time.monotonic():
            packet = self.on_the_way.popleft()[1]
            try:
                os.write(self.target, packet)
                self.carried += 1
            except OSError:  # the device is down
                self.dropped += 1


class _Stopped(Exception):
    pass


def _stop(*_: object) -> None:
    raise _Stopped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("devices", nargs=2)
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--delay-ms", type=float, required=True)
    parser.add_argument("--mtu", type=int, default=9000)
    arguments = parser.parse_args()
    one, other = (open_tun(name) for name in arguments.devices)
    options = (arguments.mbit * 1e6 / 8, arguments.delay_ms / 1e3)
    directions = {one: Direction(one, other, *options), other: Direction(other, one, *options)}
    try:
        # If the relay waited for a core, packets would have a longer delay than requested.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError as error:
        print(f"delayed_link: no real-time priority ({error}): delays will vary", flush=True)
    signal.signal(signal.SIGTERM, _stop)
    begin = time.monotonic()
    try:
        while True:
            due = [d.on_the_way[0][0] for d in directions.values() if d.on_the_way]
            wait = max(0.0, min(due) - time.monotonic()) if due else None
            for device in select.select(list(directions), [], [], wait)[0]:
                directions[device].take(arguments.mtu)
            for direction in directions.values():
                direction.deliver()
    except _Stopped:
        pass
    used = resource.getrusage(resource.RUSAGE_SELF)
    share = (used.ru_utime + used.ru_stime) / (time.monotonic() - begin)
    carried = sum(direction.carried for direction in directions.values())
    dropped = sum(direction.dropped for direction in directions.values())
    print(f"delayed_link: {carried} packets, {dropped} dropped, {100 * share:.1f} % of a core")


if __name__ == "__main__":
    main()
