# SPDX-License-Identifier: BSD-3-Clause
"""What communication of a backward was hidden behind computation, and what was not."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BucketOverlap:
    """One bucket's way. Seconds since backward began; ``ready_s <= launched_s <= arrived_s``.

    Attributes:
        parameters: indices of its parameters in ``module.parameters()``.
        names: of these parameters.
        bytes: what this process gave to the process group, or to the communication hook.
        ready_s: its last gradient was computed; ``launched_s`` where this process missed one.
        launched_s: it was packed, and handed to the process group.
        arrived_s: its sum was there. From ``launched_s`` on it was in flight, which includes
            waiting for the last process to send its part.
        awaited_s: somebody began to wait for it; may be before or after it arrived.
        exposed_s: of the time in flight, what nothing hid.
        shared_memory: it was summed in memory that the processes, all of this host, share.
        by_host: it was summed in the memory of each host's processes, and then between the hosts;
            if neither, it went through the process group.
    """

    parameters: list[int]
    names: list[str]
    bytes: int
    ready_s: float
    launched_s: float
    arrived_s: float
    awaited_s: float
    exposed_s: float
    shared_memory: bool = False
    by_host: bool = False


@dataclass(frozen=True)
class OverlapReport:
    """One synchronized backward of this process; ``str()`` of it is a table. Can be pickled.

    Attributes:
        clock: ``"host"``: gradients are on the CPU. ``"device"``: times at which the device's
            streams got there. ``"host only"``: gradients are on a device without timed events, or
            on several; then these are the times at which the host asked for things, which says
            little.
        last_gradient_s: from the begin of backward until its last gradient was computed.
        backward_s: until gradients were complete; with :class:`OverlappedOptimizer`, until
            ``backward()`` returned.
        communication_s: time in which at least one bucket was in flight.
        exposed_s: of it, what nothing hid: between ``last_gradient_s`` and ``backward_s``, or,
            after that, while a module of the next forward waited for a bucket.
        hidden_s: the rest: gradients, or the next forward, were computed meanwhile.
        hidden_fraction: ``hidden_s / communication_s``; 1 if nothing was in flight.
        buckets: in launch order.
    """

    clock: str
    last_gradient_s: float
    backward_s: float
    communication_s: float
    exposed_s: float
    hidden_s: float
    hidden_fraction: float
    buckets: list[BucketOverlap]
    text: str = field(repr=False, compare=False)

    def __str__(self) -> str:
        return self.text
