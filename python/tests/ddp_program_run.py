# SPDX-License-Identifier: BSD-3-Clause
"""Defines random programs, and how ranks run them and check each step against float64.

A program is a list of operations on up to three models and their wrappers. It is the same on all
ranks, except that an operation may have arguments per rank. An operation that is not legal at its
place (a step of a model without a wrapper, for example) is skipped or made legal by rules that are
the same on every rank. So every part of a program is a program, and failures can be shrunk by
removing parts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # noqa: F401  (takes seconds; the first use of an optimizer imports it)
import torch.distributed as dist
from ddp_program_changes import change, freeze
from ddp_program_nets import Boom, Net, Quantized, plain_parameters
from ddp_program_reference import Reference, data
from ddp_program_steps import Steps
from ddp_support import dense, host_channel
from python_group import Delegate
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from apex.parallel import DistributedDataParallel

# A program takes a fraction of a second. Each NCCL group takes that long to create.
CASE_LIMIT_S = int(os.environ.get("APEX_TEST_CASE_S", "30"))
TOLERANCE = 1e-4


def two_collectives(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
    """A hook whose second collective is issued when the first has ended."""
    buffer = bucket.buffer().div_(dist.get_world_size())

    def rest(_: Any) -> Tensor:
        dist.all_reduce(buffer[1:], async_op=True).get_future().wait()
        return buffer

    return dist.all_reduce(buffer[:1], async_op=True).get_future().then(rest)


HOOKS = {  # by name, the allowed error
    "two_collectives": TOLERANCE,
    "allreduce_hook": TOLERANCE,
    "fp16_compress_hook": 1e-2,
    "fp16": 1e-2,
    "bf16": 4e-2,
}
PYTHON_HOOKS: dict[str | None, Any] = {
    "two_collectives": two_collectives,
    "allreduce_hook": default_hooks.allreduce_hook,
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
}


@dataclass
class Op:
    """``args`` contains the arguments that differ from the default. Each may be removed."""

    kind: str
    uid: int  # the seed of its data
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Program:
    seed: int
    world: int
    models: list[list[str]]  # kinds of blocks
    shared: bool  # models 0 and 1 share their first block
    ops: list[Op]
    average: str = "mean"  # of all wrappers: mean, sum or weighted
    on_failure: str = "raise"
    fault: str = ""  # planted, for the tests of the generator; see Machine.planted()


def bits(tensor: Tensor | None) -> int:
    if tensor is None:
        return 1
    values = dense(tensor).cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes(), 7) if values.numel() else 2


class Machine(Steps):
    """The state of one rank that runs a program.

    ``reference`` contains every rank's expected gradients in float64, on the rank that checks.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank, self.world = program, rank, program.world
        self.average, self.on_failure = program.average, program.on_failure
        self.checks = rank == program.seed % program.world
        self.reference = Reference(self.world, self.average)
        torch.manual_seed(100 * program.seed + rank)  # different values on every rank
        self.models = nn.ModuleList(Net(kinds) for kinds in program.models)
        # Weights of a parameter that two models share would count for one of them only.
        self.shared = program.shared and len(program.models) > 1 and self.average == "mean"
        if self.shared:
            self.models[1].blocks[0] = self.models[0].blocks[0]
        self.wrappers: list[list[DistributedDataParallel]] = [[] for _ in program.models]
        self.kinds = ["sgd"] * len(program.models)
        self.optimizers: list[torch.optim.Optimizer | None] = [None] * len(program.models)
        self.frozen: list[nn.Parameter] = []
        self.static = any(op.args.get("options", {}).get("static_graph") for op in program.ops)
        self.static = self.static and not self.shared
        self.tolerance = TOLERANCE
        self.hooked: DistributedDataParallel | None = None
        # replaced parameters that were not broadcast from rank 0 yet
        self.pending: list[nn.Parameter] = []
        # models with a change that their wrappers have not processed
        self.changed: set[int] = set()
        self.recast: set[int] = set()  # cast since the last step, so no rank may run forward alone
        self.buffers_differ: set[int] = set()  # models whose ranks have different buffers
        self.apart: set[int] = set()  # models whose ranks have different gradients
        self.held: list[Any] = []
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.python: Delegate | None = None
        self.wrong = ""  # the mismatch that a comparison has found in the current operation

    def planted(self, fault: str) -> bool:
        """Whether this rank must do something else than the reference, as a faulty library would:
        ignore the argument of this name, or spoil gradients."""
        return self.program.fault == fault

    # --- the operations ---

    def wrap(self, op: Op) -> None:
        m = op.args.get("model", 0) % len(self.models)
        options = dict(op.args.get("options", {}))
        # If a module is completely frozen, nothing is synchronized.
        if not any(p.requires_grad for p in self.models[m].parameters()):
            self.unfreeze()
        if not op.args.get("keep") or self.average == "weighted":
            self.wrappers[m].clear()
        if not self.static:
            options.pop("static_graph", None)
        if self.average != "mean":
            options.pop("gradient_predivide_factor", None)
        if options.pop("triggers", False):
            trained = [p for p in self.models[m].parameters() if p.requires_grad]
            options["allreduce_trigger_params"] = trained[::2]
        if self.models[m].has("buffer"):
            options["broadcast_buffers"] = True
            self.buffers_differ.add(m)
        averages: dict[str, Any] = {"mean": True, "sum": False, "weighted": "weighted"}
        with host_channel("0") if op.args.get("sockets") else contextlib.nullcontext():
            wrapper = DistributedDataParallel(
                self.models[m],
                process_group=self._group(op.args.get("group")),
                gradient_average=averages[self.average],
                on_failure=self.on_failure,
                **options,
            )
        self._hook(wrapper, op.args.get("hook"))
        self.wrappers[m].append(wrapper)
        self.synchronized(m)
        self.new_optimizers()

    def _hook(self, wrapper: DistributedDataParallel, hook: str | None) -> None:
        plain = (torch.float32, torch.float64)
        if self.average == "sum" or any(p.dtype not in plain for p in self.models.parameters()):
            return
        # torch's hooks use the default group. Only one wrapper may have one, because the order
        # between wrappers is not defined.
        if hook in PYTHON_HOOKS:
            if any(each is self.hooked for row in self.wrappers for each in row):
                return
            wrapper.register_comm_hook(None, PYTHON_HOOKS[hook])
            self.hooked = wrapper
        elif hook is not None:
            wrapper.register_builtin_comm_hook(hook)
        self.tolerance = max(self.tolerance, HOOKS.get(hook or "", 0.0))

    def _group(self, name: str | None) -> dist.ProcessGroup | None:
        if name is None:
            return None
        if name == "new":
            name = f"new {len(self.groups)}"
        if name not in self.groups:
            self.groups[name] = dist.new_group()
        if name == "python":
            self.python = self.python or Delegate(self.groups[name])
            return self.python
        return self.groups[name]

    def optimizer(self, op: Op) -> None:
        m = op.args.get("model", 0) % len(self.models)
        self.kinds[m] = op.args.get("optimizer", "sgd")
        self.new_optimizers()

    def new_optimizers(self) -> None:
        for m, net in enumerate(self.models):
            kind, parameters = self.kinds[m], plain_parameters(net)
            sparse = net.has("sparse")
            # The epsilon of AdamW is 0 in float16.
            not_adam = any(p.is_complex() or p.dtype == torch.float16 for p in parameters)
            if kind == "sgd" or sparse or not_adam:
                momentum = 0.0 if sparse else 0.9
                self.optimizers[m] = torch.optim.SGD(parameters, lr=0.01, momentum=momentum)
            else:
                fused = kind == "fused"
                self.optimizers[m] = torch.optim.AdamW(parameters, lr=0.001, fused=fused)

    def release(self, op: Op) -> None:
        self.held.clear()

    def freeze(self, op: Op) -> None:
        """Freeze ``parameters`` and unfreeze all others."""
        if not self.static:
            m = op.args.get("model", 0) % len(self.models)
            freeze(self, m, op.args.get("parameters", []))

    def unfreeze(self) -> None:
        self.frozen = []
        self.apply_frozen()

    def apply_frozen(self) -> None:
        frozen = self.reference.frozen = {id(p) for p in self.frozen}
        for parameter in [] if self.planted("freeze") else plain_parameters(self.models):
            parameter.requires_grad_(id(parameter) not in frozen)

    def evaluate(self, op: Op) -> None:
        """Evaluate on some ranks only. With ``grad``, gradients are enabled."""
        m = op.args.get("model", 0) % len(self.models)
        if self.rank not in op.args.get("ranks", [0]) or not self.wrappers[m]:
            return
        if m in self.changed or m in self.recast:
            return
        wrapper = self.wrappers[m][-1]
        wrapper.eval()
        with contextlib.nullcontext() if op.args.get("grad") else torch.no_grad():
            wrapper(*data(op.uid, self.rank, 0, 0))
        wrapper.train()

    def fail_forward(self, op: Op) -> None:
        m = op.args.get("model", 0) % len(self.models)
        if not self.wrappers[m]:
            return
        at = op.args.get("block", 0) % len(self.models[m].blocks)
        try:
            self.wrappers[m][-1](*data(op.uid, self.rank, 0, 0), fail_at=at)
        except Boom:
            self.synchronized(m, forward=True)
        else:
            raise AssertionError("the exception in forward was lost")

    def change(self, op: Op) -> None:
        m = op.args.get("model", 0) % len(self.models)
        change(self, m, op.args.get("what", "data"), op.args.get("block", 0))

    def replaced(self, part: nn.Module, frozen: list[nn.Parameter]) -> None:
        self.frozen = [*self.frozen, *frozen]
        self.reference.frozen = {id(p) for p in self.frozen}
        self.pending += list(part.parameters())
        new = {id(p) for p in part.parameters()}
        for i, net in enumerate(self.models):
            if any(id(p) in new for p in net.parameters()):
                self.changed.add(i)
                if net.has("buffer"):
                    self.buffers_differ.add(i)

    def synchronized(self, m: int, forward: bool = False) -> None:
        """A wrapper of model ``m`` has broadcast rank 0's parameters; in forward, its buffers."""
        own = {id(p) for p in self.models[m].parameters()}
        self.pending = [p for p in self.pending if id(p) not in own]
        if len(self.wrappers[m]) < 2:  # another wrapper has not processed the change yet
            self.changed.discard(m)
        if forward:
            self.buffers_differ.discard(m)

    # --- all together ---

    def run(self) -> None:
        with self._groups_at_end():
            for index, op in enumerate(self.program.ops):
                error = ""
                try:
                    if op.kind not in ("step", "evaluate", "release", "fail_forward"):
                        self.forget_gradients(only_apart=True)
                    getattr(self, op.kind)(op)
                except Exception as failed:  # noqa: BLE001  (reported to all ranks)
                    error = "".join(traceback.format_exception(failed)[-3:])
                self._agree(f"op {index} ({op.kind})", error or self.wrong)
                for m, net in enumerate(self.models if self.checks else []):
                    if m not in self.apart:
                        self.reference.continue_from(list(net.parameters()))

    @contextlib.contextmanager
    def _groups_at_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.wrappers.clear()
            self.held.clear()
            self.python = None
            for group in self.groups.values():
                dist.destroy_process_group(group)

    def _agree(self, what: str, error: str) -> None:
        """Check bitwise equality on all ranks, and that no rank has failed."""
        values: dict[str, int] = {}
        unknown = {id(p) for p in self.pending}
        for m, net in enumerate(self.models):
            if self.wrappers[m] and not error:
                for name, p in net.named_parameters():
                    if id(p) not in unknown and not isinstance(p, Quantized):
                        values[f"{m}.{name}"] = bits(p)
                        if m not in self.apart:
                            values[f"{m}.{name}.grad"] = bits(p.grad)
                if m not in self.buffers_differ:
                    values.update((f"{m}.{name}", bits(b)) for name, b in net.named_buffers())
        digest = zlib.crc32(repr(sorted(values.items())).encode())
        mine = torch.tensor([bool(error), digest])
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        if any(row[0] for row in everyone):
            raise AssertionError(f"{what}: {error or 'another rank failed'}")
        if any(row[1] != digest for row in everyone):
            all_values: list[Any] = [None] * self.world
            dist.all_gather_object(all_values, values)
            differ = [k for k in values if any(row.get(k) != values[k] for row in all_values)]
            raise AssertionError(f"{what}: ranks differ in bits: {differ}")


def run_programs(
    rank: int, world: int, programs: list[Program], folder: str, limit_s: float = CASE_LIMIT_S
) -> None:
    """Run all programs, each within ``limit_s``. A stuck rank ends its process, and leaves its
    stack in ``folder``."""
    torch.backends.cudnn.allow_tf32 = False  # convolutions are compared with float64
    with open(os.path.join(folder, str(rank)), "w") as notes:
        for program in programs:
            notes.seek(0)
            notes.truncate()
            notes.write(f"program of seed {program.seed}: stuck\n")
            notes.flush()
            faulthandler.dump_traceback_later(limit_s, exit=True, file=notes)
            try:
                Machine(program, rank).run()
            except Exception as error:
                raise AssertionError(f"program of seed {program.seed}: {error}") from None
            finally:
                faulthandler.cancel_dump_traceback_later()
