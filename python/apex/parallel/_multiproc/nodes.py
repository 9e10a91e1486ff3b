# SPDX-License-Identifier: BSD-3-Clause
"""How the launchers of a job on several nodes learn that one of them has failed.

The agent of each node only watches its own processes. Ranks on other nodes may wait for a lost one
for as long as their process group's timeout, so the launchers tell each other: each keeps a
connection to the store at the job's meeting point, the one that fails sets a key there, and the
others stop. A store that is gone while processes still run means that node 0 is gone.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

from torch import distributed as dist

#: How often the store is asked, in seconds.
PERIOD_S = 0.5
#: How long a launcher has to come to its own end after the store is gone, in seconds.
GRACE_S = 10.0
#: How long a host name may be unknown, in seconds: names of containers come with the containers.
RESOLVE_S = 10.0

_FAILED_KEY = "apex_multiproc_failed_node"
_HEARD_KEY = "apex_multiproc_nodes_that_heard"
_reason: str | None = None


def reason_to_stop() -> str | None:
    """Why this node was stopped by another one: a sentence; None if it was not."""
    return _reason


class NotMet(Exception):
    """Node 0 was not reached; the message says why and, after a colon, what to do."""


def reach(master: tuple[str, int], node_rank: int, timeout_s: float) -> None:
    """Wait until node 0 listens, or, on node 0, until its name is known.

    torch's store would try again for as long as the timeout, and past it, whatever the reason.

    Args:
        master: address and port of node 0.
        node_rank: of this node.
        timeout_s: how long to wait, in seconds.

    Raises:
        NotMet: when the name is not known after RESOLVE_S, or nobody listens after timeout_s.
    """
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        try:
            socket.getaddrinfo(*master, type=socket.SOCK_STREAM)
            if node_rank == 0:
                return
            socket.create_connection(master, timeout=max(0.1, timeout_s - waited)).close()
            return
        except (socket.gaierror, UnicodeError) as error:
            if waited >= min(RESOLVE_S, timeout_s) or isinstance(error, UnicodeError):
                raise NotMet(
                    f"the host {master[0]!r} is unknown ({error}): correct --master-addr, or give "
                    "the address as a number"
                ) from None
        except OSError as error:
            if time.monotonic() - start >= timeout_s:
                raise NotMet(
                    f"nobody listens at {master[0]}:{master[1]} after {timeout_s:g} s ({error}): "
                    "check --master-addr and --master-port, that node 0 was started, and the "
                    "firewall"
                ) from None
        time.sleep(min(PERIOD_S, timeout_s))


@contextlib.contextmanager
def watch(
    master: tuple[str, int] | None, nodes: int, node_rank: int, timeout_s: int
) -> Iterator[None]:
    """While within, SIGTERM this process when another node fails; tell the others if this one does.

    Args:
        master: where the store of the job is, or will be.
        nodes: of the job; with one node nothing happens.
        node_rank: of this node.
        timeout_s: how long to wait for the store to appear, in seconds.
    """
    if master is None or nodes == 1:
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(master, timeout_s, done), name="apex_multiproc_nodes", daemon=True
    )
    watcher.start()
    try:
        yield
    except dist.DistError:  # the nodes have not met: each of them learns that by its own timeout
        raise
    except BaseException:
        done.set()  # before the key is there for the own watcher to see
        if _reason is None:
            _tell(master, nodes, node_rank)
        raise
    finally:
        done.set()


def _connect(master: tuple[str, int], timeout_s: float) -> dist.TCPStore:
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(*master, is_master=False, wait_for_workers=False, timeout=timeout)


def _tell(master: tuple[str, int], nodes: int, node_rank: int) -> None:
    # Where the store itself is gone, the others see that.
    with contextlib.suppress(dist.DistError, RuntimeError):
        store = _connect(master, GRACE_S)
        store.set(_FAILED_KEY, str(node_rank))
        # The store ends with the process of node 0: let the others read it first.
        end = time.monotonic() + GRACE_S
        while node_rank == 0 and store.add(_HEARD_KEY, 0) < nodes - 1:
            if time.monotonic() > end:  # a node has ended already, or is gone
                break
            time.sleep(PERIOD_S / 10)


def _watch(master: tuple[str, int], timeout_s: int, done: threading.Event) -> None:
    try:
        store = _connect(master, timeout_s)
    except (dist.DistError, RuntimeError):
        return  # the agent cannot meet the others either, and says so
    while not done.wait(PERIOD_S):
        try:
            if store.check([_FAILED_KEY]):
                node = store.get(_FAILED_KEY).decode()
                store.add(_HEARD_KEY, 1)
                _stop(f"node {node} has failed.")
                return
        except (dist.DistError, RuntimeError):
            if not done.wait(GRACE_S):
                _stop(f"node 0 at {master[0]}:{master[1]} is gone.")
            return


def _stop(reason: str) -> None:
    global _reason
    _reason = reason
    os.kill(os.getpid(), signal.SIGTERM)
