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
import copy
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
from ddp_program_nets import SHARING, WIDTH, Block, Boom, Net, in_lockstep
from ddp_support import (
    DEVICE,
    check,
    check_near,
    dense,
    to_reference,
    wide,
    widen,
)
from python_group import Delegate
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from apex.parallel import DistributedDataParallel

# A program takes a fraction of a second. Each NCCL group takes that long to create.
CASE_LIMIT_S = 6 if DEVICE == "cpu" else 30
TOLERANCE = 1e-4
TINY = 1e-38  # float32's smallest normal number is 1.2e-38
HOOKS = {  # by name, the allowed error
    "allreduce_hook": TOLERANCE,
    "fp16_compress_hook": 1e-2,
    "fp16": 1e-2,
    "bf16": 4e-2,
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


@dataclass
class Forward:
    model: int
    wrapper: DistributedDataParallel
    skip: list[list[int]]  # [rank]


def data(uid: int, rank: int, micro: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(((uid * 8 + rank) * 8 + micro) * 8 + index)
    x = torch.randn(WIDTH, WIDTH, generator=generator).requires_grad_()
    return x, torch.randint(5, (WIDTH,), generator=generator)


def bits(tensor: Tensor | None) -> int:
    if tensor is None:
        return 1
    values = dense(tensor).cpu().contiguous().reshape(-1)
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes(), 7) if values.numel() else 2


class Machine:
    """The state of one rank that runs a program.

    ``local`` contains every rank's expected gradients in float64, on the rank that checks.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank, self.world = program, rank, program.world
        self.checks = rank == program.seed % program.world
        torch.manual_seed(100 * program.seed + rank)  # different values on every rank
        self.models = nn.ModuleList(Net(kinds) for kinds in program.models)
        self.shared = program.shared and len(program.models) > 1
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
        self.moved: set[int] = set()  # models whose parameters' data was replaced
        self.recast: set[int] = set()  # cast since the last step, so no rank may run forward alone
        self.held: list[Tensor] = []
        self.groups: dict[str, dist.ProcessGroup] = {}
        self.python: Delegate | None = None
        self.local: dict[nn.Parameter, list[Tensor | None]] = {}
        self.size: dict[nn.Parameter, float] = {}
        self.wrong = ""  # the mismatch that a comparison has found in the current operation
        self.fired: set[int] = (
            set()
        )  # contributed to by a rank since the last synchronized backward

    # --- the operations ---

    def wrap(self, op: Op) -> None:
        m = op.args.get("model", 0) % len(self.models)
        options = dict(op.args.get("options", {}))
        if not self.static:
            options.pop("static_graph", None)
        # If a module is completely frozen, nothing is synchronized.
        if not any(p.requires_grad for p in self.models[m].parameters()):
            self.frozen = []
            self._apply_frozen()
        if not op.args.get("keep"):
            self.wrappers[m].clear()
        wrapper = DistributedDataParallel(
            self.models[m], process_group=self._group(op.args.get("group")), **options
        )
        hook = op.args.get("hook")
        # torch's hooks use the default group. Only one wrapper may have one, because the order
        # between wrappers is not defined.
        if hook in default_hooks.__dict__:
            live = [each for row in self.wrappers for each in row]
            if any(each is self.hooked for each in live):
                hook = None
            else:
                wrapper.register_comm_hook(None, getattr(default_hooks, hook))
                self.hooked = wrapper
        elif hook is not None:
            wrapper.register_builtin_comm_hook(hook)
        self.tolerance = max(self.tolerance, HOOKS.get(hook, 0.0))
        self.wrappers[m].append(wrapper)
        self._synchronized(m)
        self._new_optimizers()

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
        self._new_optimizers()

    def _new_optimizers(self) -> None:
        for m, net in enumerate(self.models):
            kind, parameters = self.kinds[m], list(net.parameters())
            sparse = any(block.kind == "sparse" for block in net.blocks)
            if kind == "sgd" or sparse:
                momentum = 0.0 if sparse else 0.9
                self.optimizers[m] = torch.optim.SGD(parameters, lr=0.01, momentum=momentum)
            else:
                fused = kind == "fused"
                self.optimizers[m] = torch.optim.AdamW(parameters, lr=0.001, fused=fused)

    def release(self, op: Op) -> None:
        self.held.clear()

    def freeze(self, op: Op) -> None:
        """Freeze ``parameters`` and unfreeze all others."""
        m = op.args.get("model", 0) % len(self.models)
        if self.static:
            return
        parameters = list(self.models[m].parameters())
        keep = [p for p in self.frozen if not any(p is q for q in parameters)]
        which = op.args.get("parameters", [])
        self.frozen = keep + [parameters[i % len(parameters)] for i in which]
        self._apply_frozen()

    def _apply_frozen(self) -> None:
        frozen = {id(p) for p in self.frozen}
        for parameter in self.models.parameters():
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
            self._synchronized(m)
        else:
            raise AssertionError("the exception in forward was lost")

    def change(self, op: Op) -> None:
        m = op.args.get("model", 0) % len(self.models)
        net, what = self.models[m], op.args.get("what", "data")
        if what in ("double", "float", "half_float", "data", "transposed", "channels_last"):
            self.moved.add(m)
            self.recast.add(m)
        getattr(self, f"_change_{what}")(net, m, op)
        if what not in ("grad_data", "grad_new", "rebuild_buckets"):
            self._new_optimizers()

    def _change_double(self, net: Net, m: int, op: Op) -> None:
        net.double()

    def _change_float(self, net: Net, m: int, op: Op) -> None:
        net.float()

    def _change_half_float(self, net: Net, m: int, op: Op) -> None:
        net.half().float()

    def _change_channels_last(self, net: Net, m: int, op: Op) -> None:
        net.to(memory_format=torch.channels_last)

    def _change_data(self, net: Net, m: int, op: Op) -> None:
        for parameter in net.parameters():
            parameter.data = parameter.data * 1.01

    def _change_transposed(self, net: Net, m: int, op: Op) -> None:
        for parameter in net.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()

    def _change_grad_data(self, net: Net, m: int, op: Op) -> None:
        for parameter in net.parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad.data = parameter.grad.data.clone()

    def _change_grad_new(self, net: Net, m: int, op: Op) -> None:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _change_load(self, net: Net, m: int, op: Op) -> None:
        state = net.state_dict()
        net.load_state_dict({k: v * 0.9 if v.is_floating_point() else v for k, v in state.items()})

    def _change_assign(self, net: Net, m: int, op: Op) -> None:
        """Assign different values on each rank. The next forward broadcasts rank 0's."""
        state = {k: v.clone() for k, v in net.state_dict().items()}
        for name, _ in net.named_parameters():
            state[name] += self.rank
        frozen = [name for name, p in net.named_parameters() if not p.requires_grad]
        net.load_state_dict(state, assign=True)
        self._replaced(net, [p for name, p in net.named_parameters() if name in frozen])

    def _change_replace(self, net: Net, m: int, op: Op) -> None:
        b = op.args.get("block", 0) % len(net.blocks)
        if b == 0 and m == 1 and self.shared:
            return
        net.blocks[b] = Block(net.blocks[b].kind)
        self._replaced(net.blocks[b], [])

    def _change_rebuild_buckets(self, net: Net, m: int, op: Op) -> None:
        for wrapper in self.wrappers[m]:
            wrapper.rebuild_buckets()

    def _change_copy(self, net: Net, m: int, op: Op) -> None:
        """Replace the wrapper by a copy of itself, with copied parameters."""
        if not self.wrappers[m] or self.shared or m in self.changed:
            return
        self.frozen = []
        self._apply_frozen()
        twin = copy.deepcopy(self.wrappers[m][-1])
        if self.wrappers[m][-1] is self.hooked:
            self.hooked = twin
        self.models[m] = twin.module
        self.wrappers[m] = [twin]
        self.changed.add(m)

    def _replaced(self, part: nn.Module, frozen: list[nn.Parameter]) -> None:
        self.frozen = [*self.frozen, *frozen]
        self.pending += list(part.parameters())
        new = {id(p) for p in part.parameters()}
        for i, net in enumerate(self.models):
            if any(id(p) in new for p in net.parameters()):
                self.changed.add(i)

    def _synchronized(self, m: int) -> None:
        """A wrapper of model ``m`` has broadcast rank 0's parameters."""
        own = {id(p) for p in self.models[m].parameters()}
        self.pending = [p for p in self.pending if id(p) not in own]
        if len(self.wrappers[m]) < 2:  # another wrapper has not processed the change yet
            self.changed.discard(m)

    # --- a step ---

    def step(self, op: Op) -> None:
        args = op.args
        forwards = self._forwards(args)
        if not forwards:
            return
        self.recast.clear()
        self._clear(args.get("clear", "none"))
        self.size.clear()
        boom, more = args.get("raises"), args.get("more", [])
        drop = [rank for rank in args.get("drop", []) if rank < self.world]
        if any(block.kind == "syncbn" for f in forwards
               for block in self.models[f.model].blocks):  # fmt: skip
            boom, drop, more = None, [], []  # the other ranks would wait in batch norm
        if self.rank in more:  # a forward without a backward
            x, ids = data(op.uid, self.rank, 0, 0)
            forwards[0].wrapper(x, ids, forwards[0].skip[self.rank], None, None)
        accumulate = args.get("accumulate", 0)
        # torch accumulates gradients that share memory incorrectly, even without a wrapper.
        if any(block.kind in SHARING for f in forwards for block in self.models[f.model].blocks):
            accumulate = 0
        for micro in range(accumulate + 1):
            last = micro == accumulate
            with contextlib.ExitStack() as quiet:
                if not last:
                    self._enter_no_sync(quiet)
                if args.get("alone"):  # an injected fault, for the tests of the generator
                    self._enter_no_sync(quiet)
                todo = self._run_forwards(op, forwards, micro, boom if last else None)
                if last and boom:
                    self._raise_and_recover(op, forwards, todo, boom, micro)
                    return
                if last and drop:
                    self._drop(op, forwards[0], todo, drop)
                    break
                for i, loss in enumerate(todo):
                    loss.backward(retain_graph=i + 1 < len(todo))
                del todo, loss
            if self.rank == args.get("waits"):  # another injected fault
                dist.recv(torch.zeros(1))
            if self.rank == args.get("sabotage"):  # another injected fault
                next(p for p in self.models.parameters() if p.grad is not None).grad.add_(1e-3)
            if self.checks:
                self._expect(op, forwards, micro, last, args.get("how", "sum"))
                with self._told_at_end():
                    self._compare(f"micro-batch {micro}")
        if not args.get("no_optimizer"):
            for m in sorted({f.model for f in forwards}):
                self.optimizers[m].step()

    def _enter_no_sync(self, stack: contextlib.ExitStack) -> None:
        for wrapper in (each for row in self.wrappers for each in row):
            stack.enter_context(wrapper.no_sync())

    def _forwards(self, args: dict[str, Any]) -> list[Forward]:
        result = []
        for each in args.get("forwards", [{}]):
            m = each.get("model", 0) % len(self.models)
            if not self.wrappers[m]:
                continue
            kinds = [block.kind for block in self.models[m].blocks]
            rows = each.get("skip", [])
            usable = rows and not self.static and "syncbn" not in kinds
            skip = [rows[r % len(rows)] if usable else [] for r in range(self.world)]
            old = each.get("old")
            wrapper = self.wrappers[m][0 if old else -1]
            result.append(Forward(m, wrapper, skip))
        return result

    def _uses(self, forward: Forward, rank: int, before: int | None = None) -> bool:
        """Whether a rank's gradients depend on its blocks up to ``before``."""
        frozen = {id(p) for p in self.frozen}
        return any(
            id(p) not in frozen
            for i, block in enumerate(self.models[forward.model].blocks[:before])
            if i not in forward.skip[rank]
            for p in block.parameters()
        )

    def _clear(self, how: str) -> None:
        if how == "skip":
            return
        self.models.zero_grad(set_to_none=how == "none")
        for row in self.local.values():
            row[:] = [None if g is None or how == "none" else torch.zeros_like(g) for g in row]

    def _run_forwards(
        self, op: Op, forwards: list[Forward], micro: int, boom: dict[str, Any] | None
    ) -> list[Tensor]:
        args, outputs = op.args, []
        checkpointed = args.get("checkpoint")
        if checkpointed == "reentrant" and len(forwards) > 1:
            # the same number of uses in each backward as in the first
            checkpointed = "non-reentrant"
        raising = None
        if boom and self.rank in boom["ranks"]:
            raising = boom["forward"] % len(forwards)
        for index, forward in enumerate(forwards):
            x, ids = data(op.uid, self.rank, micro, index)
            if args.get("chain") and outputs:
                x = outputs[-1]
            at = boom["block"] % len(self.models[forward.model].blocks) if boom else None
            output = forward.wrapper(
                x, ids, forward.skip[self.rank], checkpointed, at if raising == index else None
            )
            outputs.append(output)
            self._synchronized(forward.model)
            if args.get("collective"):
                sums = torch.full((3,), self.rank + 1.0)
                dist.all_reduce(sums)
                check(sums[0] == self.world * (self.world + 1) / 2, f"the user's sum is {sums}")
        if self.rank in args.get("hold", []):
            self.held.append(outputs[-1])
        how = "sum" if boom else args.get("how", "sum")
        return losses(outputs, how, args.get("chain", False), args.get("tiny", False))

    def _raise_and_recover(
        self, op: Op, forwards: list[Forward], todo: list[Tensor], boom: dict[str, Any], micro: int
    ) -> None:
        """Ranks in ``boom["ranks"]`` raise in backward. The others raise too, unless those ranks
        had sent everything. Then they have their averages."""
        error: BaseException | None = None
        try:
            todo[0].backward()
        except RuntimeError as caught:
            error = caught
        todo.clear()
        outcomes: list[bool] = [False] * self.world
        dist.all_gather_object(outcomes, error is not None)
        raising = [r for r in range(self.world) if r in boom["ranks"]]
        others = [outcomes[r] for r in range(self.world) if r not in raising]
        check(all(outcomes[r] for r in raising), f"ranks {raising} raise, got {outcomes}")
        check(len(set(others)) <= 1, f"not all ranks raised: {outcomes}, {raising} on purpose")
        k = boom["forward"] % len(forwards)
        before = boom["block"] % len(self.models[forwards[k].model].blocks)
        for rank in raising:
            owes = self._uses(forwards[k], rank, before)
            check(not (owes and others) or others[0], f"rank {rank} owes gradients, {outcomes}")
        if self.checks and error is None:
            self._expect(op, forwards, micro, True, "sum")
            self._compare("after another rank raised")
        error = None
        self._clear("none")
        self.fired.clear()

    def _drop(self, op: Op, forward: Forward, todo: list[Tensor], drop: list[int]) -> None:
        """Ranks in ``drop`` skip the step. No rank has a gradient after it."""
        loss = sum(todo)
        if self.rank in drop:
            zero = forward.wrapper.skip_step()
            loss = zero if op.uid % 2 else loss
        loss.backward()
        todo.clear()
        # A wrapper that was created while everything was frozen has nothing to skip.
        trains = any(p.requires_grad for p in self.models[forward.model].parameters())
        skipped = forward.wrapper.step_skipped
        check(skipped or not trains, f"ranks {drop} skip the step, but it was not skipped")
        for name, parameter in self.models[forward.model].named_parameters():
            check(
                parameter.grad is None or not parameter.requires_grad,
                f"after a skipped step {name} has a gradient",
            )
        self._clear("none")
        self.fired.clear()

    # --- the reference ---

    def _expect(
        self, op: Op, forwards: list[Forward], micro: int, synchronized: bool, how: str
    ) -> None:
        """Add the gradients of one micro-batch to ``local``."""
        references = [to_reference(self.models) for _ in range(self.world)]
        parameters = list(self.models.parameters())
        own = [list(reference.parameters()) for reference in references]
        frozen = {id(p) for p in self.frozen}
        for row in own:
            for actual, parameter in zip(parameters, row, strict=True):
                parameter.requires_grad_(id(actual) not in frozen)
        outputs: list[list[Tensor]] = []
        for index, forward in enumerate(forwards):
            batches = [data(op.uid, rank, micro, index) for rank in range(self.world)]
            inputs = [widen(x) for x, _ in batches]
            if op.args.get("chain") and outputs:
                inputs = outputs[-1]
            nets = [reference[forward.model] for reference in references]
            outputs.append(in_lockstep(nets, inputs, [ids for _, ids in batches], forward.skip))
        chain, tiny = op.args.get("chain", False), op.args.get("tiny", False)
        todo = [losses([out[r] for out in outputs], how, chain, tiny) for r in range(self.world)]
        for i in range(len(todo[0])):
            for row in own:
                for parameter in row:
                    parameter.grad = None
            sum(losses_[i] for losses_ in todo).backward(retain_graph=True)
            for index, parameter in enumerate(parameters):
                self._add(parameter, [row[index].grad for row in own])
                if synchronized:
                    self._average(parameter)

    def _add(self, parameter: nn.Parameter, grads: list[Tensor | None]) -> None:
        row = self.local.setdefault(parameter, [None] * self.world)
        for rank, grad in enumerate(grads):
            if grad is None:
                continue
            self.fired.add(id(parameter))
            grad = dense(grad)
            row[rank] = grad.clone() if row[rank] is None else row[rank] + grad
        sizes = [g.abs().max().item() for g in [*row, *map(dense, grads)] if g is not None]
        self.size[parameter] = max([self.size.get(parameter, 0.0), *sizes])

    def _average(self, parameter: nn.Parameter) -> None:
        """Average, if any rank has contributed since the last synchronized backward."""
        row = self.local[parameter]
        if id(parameter) in self.fired:
            self.fired.discard(id(parameter))
            if any(grad is not None for grad in row):
                total = sum(grad for grad in row if grad is not None)
                row[:] = [total / self.world] * self.world

    @contextlib.contextmanager
    def _told_at_end(self) -> Iterator[None]:
        """Continue the operation, because the other ranks do."""
        try:
            yield
        except AssertionError as wrong:
            self.wrong = self.wrong or str(wrong)

    def _compare(self, what: str) -> None:
        for m, net in enumerate(self.models):
            if not self.wrappers[m]:
                continue
            for name, parameter in net.named_parameters():
                row = self.local.get(parameter)
                expected = None if row is None else row[self.rank]
                check_near(
                    dense(parameter.grad), expected, f"{what}: gradient of {m}.{name}",
                    self.tolerance, max(self.size.get(parameter, 0.0), 1e-2),
                )  # fmt: skip

    def _note_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Use the actual gradients, equal on all ranks, so that errors do not accumulate over
        steps."""
        for parameter in parameters:
            grad = dense(parameter.grad)
            value = None if grad is None else grad.to(wide(grad.dtype)).clone()
            self.local[parameter] = [value] * self.world

    # --- all together ---

    def run(self) -> None:
        with self._groups_at_end():
            for index, op in enumerate(self.program.ops):
                error = ""
                try:
                    getattr(self, op.kind)(op)
                except Exception as failed:  # noqa: BLE001  (reported to all ranks)
                    error = "".join(traceback.format_exception(failed)[-3:])
                self._agree(f"op {index} ({op.kind})", error or self.wrong)
                if self.checks:
                    self._note_gradients(list(self.models.parameters()))

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
                    if id(p) not in unknown:
                        values[f"{m}.{name}"] = bits(p)
                        values[f"{m}.{name}.grad"] = bits(p.grad)
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


def losses(outputs: list[Tensor], how: str, chain: bool, tiny: bool) -> list[Tensor]:
    """The losses of the backwards, in order."""
    if chain:
        outputs = outputs[-1:]
    if tiny:
        return [loss * TINY for loss in losses(outputs, how, False, False)]
    first = [output.square().mean() for output in outputs]
    second = [torch.sin(output).mean() for output in outputs]
    each = [a + b for a, b in zip(first, second, strict=True)]
    if how == "each":
        return each
    if how == "reversed":
        return each[::-1]
    if how == "twice":
        return [sum(first), sum(second)]
    return [sum(each)]


def run_programs(rank: int, world: int, programs: list[Program], folder: str) -> None:
    """Run all programs. A stuck rank ends its process, and leaves its stack in ``folder``."""
    torch.backends.cudnn.allow_tf32 = False  # convolutions are compared with float64
    with open(os.path.join(folder, str(rank)), "w") as notes:
        for program in programs:
            notes.seek(0)
            notes.truncate()
            notes.write(f"program of seed {program.seed}: stuck\n")
            notes.flush()
            faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True, file=notes)
            try:
                Machine(program, rank).run()
            except Exception as error:
                raise AssertionError(f"program of seed {program.seed}: {error}") from None
            finally:
                faulthandler.cancel_dump_traceback_later()
