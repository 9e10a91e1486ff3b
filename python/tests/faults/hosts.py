# SPDX-License-Identifier: BSD-3-Clause
"""Puts ranks on separate hosts, simulated by network namespaces."""

from __future__ import annotations

import subprocess


class Hosts:
    """Network namespaces joined by a bridge, one for each rank of a case."""

    def __init__(self, slot: int, size: int) -> None:
        self.name = f"apexf{slot}"
        self.names = [f"{self.name}-{rank}" for rank in range(size)]
        self._ip("netns", "add", self.name)
        self._ip("-n", self.name, "link", "add", "br0", "type", "bridge")
        self._ip("-n", self.name, "link", "set", "br0", "up")
        for rank, name in enumerate(self.names):
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "set", "lo", "up")
            peer = ["type", "veth", "peer", "name", f"port{rank}", "netns", self.name]
            self._ip("-n", name, "link", "add", "eth0", *peer)
            self._ip("-n", name, "addr", "add", f"{self.address(rank)}/24", "dev", "eth0")
            self._ip("-n", name, "link", "set", "eth0", "up")
            self._ip("-n", self.name, "link", "set", f"port{rank}", "master", "br0", "up")

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    @staticmethod
    def address(rank: int) -> str:
        return f"10.98.0.{rank + 1}"

    def cut(self, rank: int) -> None:
        """Drop packets silently."""
        self._ip("-n", self.name, "link", "set", f"port{rank}", "nomaster")

    def join(self, rank: int) -> None:
        self._ip("-n", self.name, "link", "set", f"port{rank}", "master", "br0")

    def close(self) -> None:
        for name in [*self.names, self.name]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
