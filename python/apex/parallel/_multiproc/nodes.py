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
import threading
import time
from collections.abc import Iterator

from torch import distributed as dist

#: How often the store is asked, in seconds.
PERIOD_S = 0.5
#: How long a launcher has to come to its own end after the store is gone, in seconds.
GRACE_S = 10.0

_FAILED_KEY = "apex_multiproc_failed_node"
_HEARD_KEY = "apex_multiproc_nodes_that_heard"
_reason: str | None = None


def reason_to_stop() -> str | None:
    """Why this node was stopped by another one: a sentence; None if it was not."""
    return _reason


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
    except dist.DistNetworkError:  # the store is not there: nobody could be told
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
