# SPDX-License-Identifier: BSD-3-Clause
"""Which host a process runs on."""

from __future__ import annotations

import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_of_host() -> str:
    """The same for processes under one boot of a kernel, in containers as well.

    Where the system does not say, the name of the host.
    """
    try:
        return _BOOT_ID.read_text().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()
