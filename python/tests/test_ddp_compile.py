# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile: graphs that are split by bucket, so that compiled backwards overlap with
all-reduces."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
from ddp_support import (
    bucket_names,
    check,
    check_equal,
    check_gradients,
    check_same_on_all_ranks,
    gradients,
    on_ranks,
    raises,
    to_reference,
)
from torch import Tensor, nn

from apex.optimizers import ShardedOptimizer
from apex.parallel import DistributedDataParallel, _compile

pytestmark = pytest.mark.processes

splits = pytest.mark.skipif(
    not _compile.splits_graphs(), reason=f"torch {torch.__version__} does not ask a wrapper of ours"
)

# Compiling takes seconds, and longer on a busy machine.
TIMEOUT_S = 400
WIDTH = 512
# A layer has a little more than 1 MiB, the smallest size by which torch's compiler splits.
LAYER = WIDTH * WIDTH + WIDTH


class Stack(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Broken(nn.Module):
    """The compiler always makes two graphs of it."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = Stack(2), Stack(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        torch._dynamo.graph_break()
        return self.back(x)


def stack_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "sequential":
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    return Broken() if kind == "broken" else Stack()


def batch(rank: int, step: int, rows: int = 3) -> Tensor:
    values = torch.arange(rows * WIDTH, dtype=torch.float32)
    return torch.sin(values.view(rows, WIDTH) + 7 * rank + 3 * step)


class Pieces:
    """A backend that counts graphs, and records the buckets in flight when each piece's backward
    began."""

    def __init__(self) -> None:
        self.graphs = 0
        self.ddp: Any = None
        self.launched: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        self.graphs += 1
        return aot_autograd(fw_compiler=_boxed, bw_compiler=self._backward)(graph, inputs)

    def _backward(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        run = _boxed(graph, inputs)

        def noting(values: list[Any]) -> Any:
            self.launched.append(self.ddp.statistics()["launched_in_backward"])
            return run(values)

        noting._boxed_call = True
        return noting


def _boxed(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    def run(values: list[Any]) -> Any:
        return graph(*values)

    run._boxed_call = True
    return run


def wrap(
    model: nn.Module, backend: Any, inside: bool, dynamic: bool | None = None, **options: Any
) -> tuple[DistributedDataParallel, nn.Module]:
    """The wrapper, and the callable that a script uses."""
    torch._dynamo.reset()
    options = {"message_size": LAYER, **options}
    if inside:
        ddp = DistributedDataParallel(
            torch.compile(model, backend=backend, dynamic=dynamic), **options
        )
        called: nn.Module = ddp
    else:
        ddp = DistributedDataParallel(model, **options)
        called = torch.compile(ddp, backend=backend, dynamic=dynamic)
    if isinstance(backend, Pieces):
        backend.ddp = ddp
    return ddp, called


def check_compiled_step(
    model: nn.Module,
    called: nn.Module,
    rank: int,
    step: int,
    rows: int = 3,
    tolerance: float = 1e-4,
) -> None:
    """Gradients are those of the mean loss over two ranks, computed without compiling."""
    reference = to_reference(model)
    for other in range(2):
        (reference(batch(other, step, rows).double()).square().sum() / 2).backward()
    model.zero_grad()
    called(batch(rank, step, rows)).square().sum().backward()
    check_gradients(model, gradients(reference), f"step {step}", tolerance)
    check_same_on_all_ranks([p.grad for p in model.parameters()], f"step {step}")


# --- the split ---


@splits
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("kind", ["stack", "sequential", "broken"])
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_compile_several_buckets_launches_between_pieces(
    rank: int, world: int, kind: str, inside: bool
) -> None:
    pieces = Pieces()
    model = stack_of(kind)
    ddp, called = wrap(model, pieces, inside)
    check_compiled_step(model, called, rank, 0)
    check(pieces.graphs >= 3, f"{pieces.graphs} graphs for {len(bucket_names(ddp))} buckets")
    check_equal(len(pieces.launched), pieces.graphs, "pieces of the backward")
    compiled = pieces.graphs
    for step in range(1, 4):
        before = ddp.statistics()["launched_in_backward"]
        pieces.launched = []
        check_compiled_step(model, called, rank, step)
        launched = [count - before for count in pieces.launched]
        # Before the last piece begins, the buckets of the previous pieces are in flight.
        check_equal(launched[0], 0, "buckets launched before backward")
        check(launched[-1] >= len(launched) - 2, f"launched before each piece: {launched}")
        check(launched[-1] >= 1, f"launched before each piece: {launched}")
    check_equal(pieces.graphs, compiled, "graphs after the first step")
    model.zero_grad()
    with ddp.no_sync():
        called(batch(rank, 4)).square().sum().backward()
    reference = to_reference(model)
    reference(batch(rank, 4).double()).square().sum().backward()
    check_gradients(model, gradients(reference), "in no_sync()", 1e-4)
    check_equal(pieces.graphs, compiled, "graphs after no_sync()")


@splits
@pytest.mark.parametrize("how", ["turned_off", "delayed", "one_bucket"])
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_compile_nothing_to_overlap_keeps_the_graph(rank: int, world: int, how: str) -> None:
    pieces = Pieces()
    model = stack_of("stack")
    try:
        torch._dynamo.config.optimize_ddp = how != "turned_off"
        options = {"delayed": {"delay_allreduce": True}, "one_bucket": {"message_size": 9 * LAYER}}
        ddp, called = wrap(model, pieces, True, **options.get(how, {}))
        for step in range(2):
            pieces.launched = []
            check_compiled_step(model, called, rank, step)
    finally:
        torch._dynamo.config.optimize_ddp = True
    # torch splits off a first piece of 1 MiB, for any bucket size.
    check_equal(pieces.graphs, 2 if how == "one_bucket" else 1, "graphs")
    check_equal(pieces.launched, [0] * pieces.graphs, "launched before each piece")


def test_compile_this_torch_asks_for_the_wrapper() -> None:
    assert _compile.splits_graphs(), (
        f"torch {torch.__version__} has no DistributedDataParallel._active_ddp_module: compiled "
        "modules train, but their graphs are not split by bucket, see apex/parallel/_compile.py"
    )


@splits
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_compile_inductor_averages(rank: int, world: int, inside: bool) -> None:
    from torch._inductor.compile_fx import compile_fx

    graphs = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return compile_fx(graph, inputs)

    model = stack_of("stack")
    ddp, called = wrap(model, counting, inside)
    for step in range(3):
        check_compiled_step(model, called, rank, step)
    check(len(graphs) >= 3, f"{len(graphs)} graphs")
    check(ddp.statistics()["launched_in_backward"] > 0, f"{ddp.statistics()}")


# --- the wrapper that the compiler sees ---


class Probe(nn.Module):
    """Records which wrapper the compiler would see."""

    def __init__(self, raises: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.raises = raises
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(nn.parallel.DistributedDataParallel._get_active_ddp_module())
        if self.raises:
            raise ValueError("on purpose")
        return x * self.weight


@splits
@on_ranks(2)
def test_compile_active_wrapper_is_restored(rank: int, world: int) -> None:
    def active() -> Any:
        return nn.parallel.DistributedDataParallel._get_active_ddp_module()

    first, second = Probe(), Probe()
    inner = DistributedDataParallel(first)
    outer = DistributedDataParallel(nn.Sequential(inner, second))
    outer(torch.ones(2))
    check(first.seen == [inner], "the inner module's forward")
    check(second.seen == [outer], "the outer module's forward, after the inner one")
    check(active() is None, "after forward")

    with torch.no_grad():
        outer(torch.ones(2))
    check(first.seen[1:] == second.seen[1:] == [None], "evaluation")

    failing = DistributedDataParallel(Probe(raises=True))
    around = DistributedDataParallel(nn.Sequential(Probe(), failing))
    with raises(ValueError, "on purpose"):
        around(torch.ones(2))
    check(active() is None, "after an exception")

    delayed = DistributedDataParallel(Probe(), delay_allreduce=True)
    delayed(torch.ones(2))
    check_equal(delayed.module.seen, [None], "delay_allreduce")


EAGER = """
import sys, torch, torch.distributed as dist
from apex.parallel import DistributedDataParallel
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
assert "torch._dynamo" not in sys.modules, "an eager step has imported torch._dynamo"
"""


def test_compile_eager_step_does_not_import_the_compiler(tmp_path: Any) -> None:
    command = [sys.executable, "-c", EAGER, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def _small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


@on_ranks(2, timeout_s=TIMEOUT_S)
def test_compile_methods_in_a_compiled_function_work(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(_small(), gradient_average="weighted")
    net = _small()
    sharded = ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)

    def weighted(x: Tensor) -> None:
        with ddp.weight(len(x)):
            ddp(x).sum().backward()

    def steps(x: Tensor) -> None:
        net(x).sum().backward()
        sharded.step()

    calls: list[Any] = [
        weighted,
        lambda x: (x * 2, ddp.statistics()),
        lambda x: ddp.skip_step() + x.sum(),
        steps,
    ]
    before = [p.detach().clone() for p in net.parameters()]
    for call in calls:
        torch._dynamo.reset()
        torch.compile(call, backend="eager")(torch.randn(2, 8))
    check_equal(ddp.total_weight, 4.0, "total weight")
    changed = [not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True)]
    check(all(changed), "the sharded step changed nothing")


@pytest.mark.parametrize("how", ["within_a_compiled_step", "enabled"])
@on_ranks(2, timeout_s=TIMEOUT_S)
def test_compile_compiled_autograd_is_refused(rank: int, world: int, how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch._dynamo.reset()
    ddp = DistributedDataParallel(model)
    x = torch.full((2, 4), rank + 1.0)

    def step() -> None:
        ddp(x).sum().backward()

    reason = "cannot be traced by compiled autograd"
    if how == "within_a_compiled_step":
        torch._dynamo.config.compiled_autograd = True
        try:
            with raises(RuntimeError, reason):
                torch.compile(step, backend="eager")()
        finally:
            torch._dynamo.config.compiled_autograd = False
    else:
        compiler = torch.compile(backend="eager")
        with raises(RuntimeError, reason), torch._dynamo.compiled_autograd._enable(compiler):
            step()
    # It was refused before any communication, so ordinary steps continue to work.
    torch._dynamo.reset()
    for _ in range(2):
        ddp.zero_grad()
        step()
        check_same_on_all_ranks([p.grad for p in ddp.parameters()], "gradients")
    check_equal(ddp.statistics()["backwards"], 2, "synchronized backwards")
