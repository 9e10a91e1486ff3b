# SPDX-License-Identifier: BSD-3-Clause
"""Ranks as processes that are started once and serve many cases, and references for the tests.
One file, because nearly every test imports both.

A test runs a module-level function ``body(rank, world, *args)`` on several ranks::

    def _averages(rank, world, factor): ...

    def test_gradients_two_ranks_average(ranks):
        ranks.run(2, _averages, 3.0)

Or it is such a function itself: see :func:`on_ranks`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import faulthandler
import importlib.util
import inspect
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

#: The device of the pool's tensors. With ``cuda``, all ranks use the first GPU, over NCCL.
DEVICE = os.environ.get("APEX_TEST_DEVICE", "cpu")
GROUP_TIMEOUT_S = 45
REPLY_TIMEOUT_S = int(os.environ.get("APEX_TEST_TIMEOUT_S", "60"))
# How long a process may take to start and import.
START_TIMEOUT_S = 240
# How long ranks may wait for a rank that has failed before they are killed.
GRACE_S = 5

# Largest error by dtype, relative to the largest contribution.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 2e-6,
    torch.complex64: 2e-6,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}


# The first optimizer imports torch._dynamo. Examples train on scikit-learn's digits.
PRELOADED = [
    *["torch._dynamo", "apex.amp", "apex.parallel", "apex.parallel.multiproc", "ddp_support"],
    *["sklearn.datasets", "sklearn.model_selection", "tqdm"],
]


class RanksFailed(AssertionError):
    """Raised in the test's process with the reports of all failing ranks."""


def forget_amp() -> None:
    """Undo amp.init() and amp.initialize(), which affect the whole process."""
    amp = sys.modules.get("apex.amp")
    if amp is None:
        return
    state = amp._amp_state
    if state.handle is not None:
        state.handle._deactivate()
        state.handle = None
    vars(state).pop("opt_properties", None)
    state.loss_scalers = []


def bucket_names(ddp: Any) -> list[list[str]]:
    """The names of the parameters in each bucket of a wrapper, in launch order."""
    names = [name for name, _ in ddp._engine.named_parameters()]
    return [[names[i] for i in bucket] for bucket in ddp._reducer.plan()]


def free_port() -> int:
    """A free TCP port of this host.

    It is below the range that the system assigns to connections. Otherwise a test that runs in
    parallel could be assigned the port before it is used.
    """
    ports = random.SystemRandom()
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", ports.randrange(10000, 28000)))
            return probe.getsockname()[1]


def serve_store() -> dist.TCPStore:
    """A store that this process serves, at a free port of 127.0.0.1.

    On a socket of its own, torch's server sees a connection as ``::ffff:127.0.0.1`` and asks for
    its name. A resolver that does not answer would stop all ranks for five seconds.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def share_one_gpu(rank: int) -> None:
    """Let ranks of one host share a GPU. Call it before NCCL starts in this process.

    NCCL refuses that, so each rank claims to be another host. NCCL 2.30 and newer has a switch.
    """
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ["NCCL_NET"] = "Socket"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"


class OnDevice(TorchFunctionMode):
    """Creates tensors on ``DEVICE`` unless the call names a device. Generators stay on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if kwargs.get("generator") is None:
            return func(*args, **{**kwargs, "device": DEVICE})
        drawn = func(*args, **kwargs)
        return drawn.detach().to(DEVICE).requires_grad_(drawn.requires_grad)


def init_group(rank: int, world: int, store: str, timeout_s: float = GROUP_TIMEOUT_S) -> None:
    """`store`: what init_method takes, or PORT/NAME of a server that another process keeps."""
    if DEVICE != "cpu":
        share_one_gpu(rank)
    timeout = datetime.timedelta(seconds=timeout_s)
    port, served, name = store.partition("/")
    how: dict[str, Any] = {"init_method": store}
    if served and port.isdecimal():
        server = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timeout)
        how = {"store": dist.PrefixStore(name, server)}
    dist.init_process_group(
        "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl",
        rank=rank,
        world_size=world,
        timeout=timeout,
        **how,
    )
    # Gloo reports a rank as connected before the others have completed the connection. If a test
    # ended the group or the rank immediately, they would find a closed connection.
    dist.barrier()


def _serve(rank: int, pipe: connection.Connection) -> None:
    """The main loop of one rank: take a task, join its group, run it, reply."""
    torch.set_num_threads(1)
    if DEVICE != "cpu":
        torch.backends.cudnn.allow_tf32 = False  # the default rounds LSTMs to 10 bits
        OnDevice().__enter__()
    pipe.send("started")
    current = None
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            break
        if not message:
            break
        try:
            timeout_s, store, world, body, args = pickle.loads(message)
            faulthandler.dump_traceback_later(timeout_s - 5)
            if store != current:
                if dist.is_initialized():
                    dist.destroy_process_group()
                init_group(rank, world, store)
                current = store
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reply = ("ok", body(rank, world, *args))
        except BaseException:  # noqa: BLE001  (everything goes to the test)
            reply = ("error", traceback.format_exc())
        forget_amp()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(reply)
    if dist.is_initialized():
        dist.destroy_process_group()


class RankPool:
    """Processes that serve as ranks 0 to ``size - 1`` for successive calls of :meth:`run`.

    The default process group is reused while the world size is the same and no rank fails.
    Otherwise the next call creates a new one. Processes that do not reply are killed, and restarted
    if needed.
    """

    def __init__(self, size: int = 4) -> None:
        self.size = size
        # Forked from a process that has imported slow modules and started no thread.
        multiprocessing.set_forkserver_preload(PRELOADED)
        self._context = mp.get_context("forkserver")
        self._processes: list[mp.Process] = []
        self._pipes: list[connection.Connection] = []
        self._starting: list[connection.Connection] = []
        self._world = 0
        self._store = ""
        # One server for all groups: the port of a server that a rank starts may be taken meanwhile.
        self._server = serve_store()
        self._groups = 0

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        world: int,
        body: Callable[..., Any],
        *args: Any,
        lost: tuple[int, ...] = (),
        timeout_s: float = REPLY_TIMEOUT_S,
    ) -> list[Any]:
        """The results of ``body(rank, world, *args)`` by rank, within ``timeout_s``.

        Ranks in ``lost`` are expected to end their process; their result is their exit code.

        Raises:
            RanksFailed: with the tracebacks of all ranks that raised or did not reply.
        """
        self._start(world)
        if world != self._world:
            self._world = world
            self._groups += 1
            self._store = f"{self._server.port}/{self._groups}"
        task = pickle.dumps((timeout_s, self._store, world, body, args))
        for pipe in self._pipes[:world]:
            pipe.send_bytes(task)
        replies = self._collect(world, lost, timeout_s)
        errors = []
        for rank in range(world):
            kind, value = replies.get(rank, ("error", "no reply in time: the process was ended\n"))
            if kind == "gone" and rank not in lost:
                kind, value = "error", f"the process ended with exit code {value}\n"
            if kind == "error":
                errors.append(f"--- rank {rank} of {world}: {value}")
        if errors or lost:
            self._world = 0  # the next call creates a new group
        if any(replies.get(rank, ("gone",))[0] == "gone" for rank in range(world)):
            self._stop()
        if errors:
            raise RanksFailed("\n" + "".join(errors))
        return [replies[rank][1] for rank in range(world)]

    def _collect(
        self, world: int, lost: tuple[int, ...], timeout_s: float
    ) -> dict[int, tuple[str, Any]]:
        replies: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(replies) < world:
            waiting = [self._pipes[rank] for rank in range(world) if rank not in replies]
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                self._show_stacks([rank for rank in range(world) if rank not in replies])
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    replies[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    replies[rank] = ("gone", self._processes[rank].exitcode)
                if replies[rank][0] != "ok" and rank not in lost:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def _show_stacks(self, silent: list[int]) -> None:
        """Print the native stacks of ranks that do not reply, if gdb is installed."""
        if shutil.which("gdb") is None:
            return
        for rank in silent:
            command = ["gdb", "-p", str(self._processes[rank].pid), "-batch", "-ex"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    [*command, "thread apply all bt 24"], capture_output=True, text=True, timeout=60
                )
                print(f"rank {rank} does not reply:\n{done.stdout}", file=sys.stderr)

    def _start(self, world: int) -> None:
        """Start the missing processes for ``world`` ranks."""
        if world > self.size:
            raise ValueError(f"{world} ranks asked of a pool of {self.size}")
        context = self._context
        for rank in range(len(self._processes), world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._starting.append(ours)
        for pipe in self._starting:
            if not pipe.poll(START_TIMEOUT_S):
                raise RanksFailed(f"a process did not start within {START_TIMEOUT_S} s")
            pipe.recv()
        self._starting.clear()

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._world = 0

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        for process in self._processes:
            process.join(10)
        self._stop()


_shared: list[RankPool] = []


def shared_pool() -> RankPool:
    """Four processes for the whole session of tests."""
    if not _shared:
        _shared.append(RankPool(4))
    return _shared[0]


def close_shared_pool() -> None:
    while _shared:
        _shared.pop().close()


# --- models at high precision ---


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def to_reference(model: nn.Module) -> nn.Module:
    """A copy with float64 (complex128) parameters and buffers, and the same sharing."""
    reference = copy.deepcopy(model)
    for tensor in [*reference.parameters(), *reference.buffers()]:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data = tensor.data.to(wide(tensor.dtype))
    reference.zero_grad()
    return reference


def widen(value: Any) -> Any:
    """Floating-point tensors in nested lists, tuples and dicts, at high precision."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            return value.detach().to(wide(value.dtype)).requires_grad_(value.requires_grad)
        return value
    if isinstance(value, dict):
        return {key: widen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(widen(item) for item in value)
    return value


def dense(grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    return (grad.to_dense() if grad.is_sparse else grad).detach()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the gradients, dense, by name, without the wrapper's prefix."""
    result = {}
    for name, parameter in model.named_parameters():
        grad = dense(parameter.grad)
        result[name.removeprefix("module.")] = None if grad is None else grad.clone()
    return result


@contextlib.contextmanager
def notices(at_least: int = 0) -> Iterator[list[str]]:
    """What the engine notes meanwhile. Waits for `at_least` texts, because a thread logs them."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("apex.parallel.watch")
    logger.addHandler(handler)
    try:
        yield texts
        until = time.monotonic() + 30
        while len(texts) < at_least and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        logger.removeHandler(handler)


def same_bits(one: object, other: object) -> bool:
    """Whether nested dicts and lists of tensors and other values are equal."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_bits(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return one == other


# --- assertions: processes of the pool run without pytest's rewriting, so these say what they saw
# ---


def check(condition: Any, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def check_equal(actual: Any, expected: Any, what: str) -> None:
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        same = (
            actual.shape == expected.shape
            and actual.dtype == expected.dtype
            and torch.equal(actual, expected)
        )
    else:
        same = actual == expected
    check(same, f"{what}: expected {expected}, got {actual}")


def check_near(
    actual: Tensor | None,
    expected: Tensor | None,
    what: str,
    tolerance: float | None = None,
    scale: float = 0.0,
) -> None:
    """Check for ``None`` where expected; otherwise the largest error against the largest value."""
    if expected is None or actual is None:
        check(actual is None and expected is None, f"{what}: expected {expected}, got {actual}")
        return
    check(
        actual.shape == expected.shape,
        f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}",
    )
    if actual.numel() == 0:
        return
    limit = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    expected = expected.detach().to(wide(expected.dtype))
    error = (actual.detach().to(wide(actual.dtype)) - expected).abs().max().item()
    scale = max(scale, expected.abs().max().item(), 1e-12)
    check(
        error <= limit * scale,
        f"{what}: error {error:.3g} at scale {scale:.3g}, allowed {limit * scale:.3g}\n"
        f"got {actual}\nexpected {expected}",
    )


def check_gradients(
    model: nn.Module, expected: dict[str, Tensor | None], what: str, tolerance: float | None = None
) -> None:
    actual = gradients(model)
    check_equal(sorted(actual), sorted(expected), f"{what}: names")
    for name, grad in actual.items():
        check_near(grad, expected[name], f"{what}: gradient of {name}", tolerance)


def check_same_on_all_ranks(tensors: list[Tensor | None], what: str) -> None:
    """Check bitwise equality on every rank of the default group, None included."""
    mine = [None if tensor is None else dense(tensor).contiguous() for tensor in tensors]
    present = torch.tensor([tensor is not None for tensor in mine], dtype=torch.int32)
    sums = present.clone()
    dist.all_reduce(sums)
    check_equal(sums, present * dist.get_world_size(), f"{what}: which tensors are there")
    values = [t.resolve_conj().resolve_neg() for t in mine if t is not None and t.numel() > 0]
    pieces = [t.reshape(-1).view(torch.uint8) for t in values]
    if pieces:
        bits = torch.cat(pieces)
        first = bits.clone()
        dist.broadcast(first, 0)
        check(
            torch.equal(bits, first), f"{what}: rank {dist.get_rank()} differs from rank 0 in bits"
        )


def mean_over_ranks(per_rank: list[dict[str, Tensor | None]]) -> dict[str, Tensor | None]:
    """The average, with zeros for ranks without a gradient; None if no rank has one."""
    result: dict[str, Tensor | None] = {}
    for name in per_rank[0]:
        present = [dense(g[name]) for g in per_rank if g[name] is not None]
        result[name] = (
            sum(p.to(wide(p.dtype)) for p in present) / len(per_rank) if present else None
        )
    return result


def alone(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | None]:
    """The gradients of one rank's loss, computed without the wrapper."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss(plain).backward()
    return gradients(plain)


def check_step(
    ddp: nn.Module, loss: Callable[[nn.Module, int], Tensor], what: str, tolerance: float = 1e-5
) -> None:
    """Check that one backward from cleared gradients gives the mean over ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    expected = mean_over_ranks([alone(ddp.module, lambda m, r=r: loss(m, r)) for r in range(world)])
    ddp.zero_grad()
    loss(ddp, rank).backward()
    check_gradients(ddp, expected, what, tolerance)
    check_same_on_all_ranks([p.grad for p in ddp.parameters()], what)


@contextlib.contextmanager
def host_channel(value: str) -> Iterator[None]:
    """Set ``APEX_HOST_CHANNEL`` in this process of the pool, and restore it for the next test."""
    os.environ["APEX_HOST_CHANNEL"] = value
    try:
        yield
    finally:
        del os.environ["APEX_HOST_CHANNEL"]


@contextlib.contextmanager
def raises(kind: type[BaseException], *fragments: str) -> Iterator[None]:
    """``pytest.raises`` for processes of the pool. The message must contain all ``fragments``."""
    try:
        yield
    except kind as error:
        for fragment in fragments:
            check(fragment in str(error), f"expected {fragment!r} in: {error}")
    else:
        raise AssertionError(f"expected {kind.__name__}, nothing was raised")


def on_ranks(world: int | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of ``body(rank, world, ...)``, whose other arguments are pytest's::

        @pytest.mark.parametrize("views", [False, True])
        @on_ranks(2)
        def test_x(rank, world, views): ...

    Without ``world``, that is a parameter too. ``options`` are those of :meth:`RankPool.run`.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        given = list(inspect.signature(body).parameters)[2:]
        named = _Named(body.__module__, body.__name__)

        def test(**arguments: Any) -> None:
            count = arguments["world"] if world is None else world
            shared_pool().run(count, named, *(arguments[name] for name in given), **options)

        names = given if world is not None else ["world", *given]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, kind) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.__name__, test.__qualname__ = body.__name__, body.__qualname__
        test.__module__, test.__doc__ = body.__module__, body.__doc__
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


@dataclasses.dataclass(frozen=True)
class _Named:
    """The body of a test, which a rank finds by its name."""

    module: str
    name: str

    def __call__(self, *arguments: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.name).body(*arguments)
