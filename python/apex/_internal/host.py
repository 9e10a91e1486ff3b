# SPDX-License-Identifier: BSD-3-Clause
"""Identifies the host that a process runs on."""

from __future__ import annotations

import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_of_host() -> str:
    """An identifier of the running kernel, equal for all processes under one boot, containers
    included. It is the host name if the system does not provide a boot id.
    """
    try:
        return _BOOT_ID.read_text().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()
