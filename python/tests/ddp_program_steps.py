# SPDX-License-Identifier: BSD-3-Clause
"""Training steps of random programs: forwards, backwards, and what may happen in them.

Each step ends with a comparison with the reference, or in an error that every rank must see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ddp_program_endings as endings
import torch
import torch.distributed as dist
from ddp_program_endings import ENDINGS
from ddp_program_nets import SHARING, Boom, Net, plain_parameters
from ddp_program_reference import Forward, data, losses
from ddp_support import check
from torch import Tensor, nn


class Steps:
    """The part of a program's Machine that trains. Every rank calls each method alike."""

    def step(self, op: Any) -> None:
        forwards = self._forwards(op.args)
        if not forwards:
            return
        args = self._legal(op.args, forwards)
        self.recast.clear()
        self._clear(args.get("clear", "none"))
        self.reference.size.clear()
        if self.rank in args.get("more", []):  # a forward without a backward
            x, ids = data(op.uid, self.rank, 0, 0)
            forwards[0].wrapper(x, ids, forwards[0].skip[self.rank])
        if "freeze_alone" in args:
            endings.freeze_alone(self, op.uid, args, forwards[0])
            return
        chosen = self._chosen(args, forwards)
        micros = args.get("accumulate", 0) + 1
        ahead = None
        if args.get("ahead"):
            ahead = [self.run_forwards(op.uid, args, forwards, i) for i in range(micros)]
        for micro in range(micros):
            last = micro + 1 == micros
            todo = ahead[micro] if ahead is not None else None
            if last and any(ending in args for ending in ENDINGS):
                endings.end(self, op.uid, args, forwards, micro, todo)
                return
            quiet = {f.model for f in forwards}
            if last:
                quiet &= set(args.get("quiet", []))
            alone = args.get("fails_locally", {}) if not last else {}
            # Either wrapper may average a parameter that both have.
            silent = {0, 1, *quiet} if quiet and self.shared else quiet
            self._micro_batch(op.uid, args, forwards, micro, todo, silent, chosen, alone)
            self._spoil(args)
            trains = [rank not in alone.get("ranks", []) for rank in range(self.world)]
            if self.checks:
                synchronized = {f.model for f in forwards} - quiet
                self.reference.backward(
                    self.models, forwards, op.uid, micro, args, args.get("how", "sum"),
                    self.weights(args, micro), synchronized, trains, chosen,
                )  # fmt: skip
                with self._told_at_end():
                    for m, net in enumerate(self.models):
                        if self.wrappers[m]:
                            what = f"micro-batch {micro}: model {m}"
                            self.reference.compare(
                                self.rank, net, what, self.tolerance, "checkpoint" in args
                            )
            self.apart = (self.apart | quiet) - ({f.model for f in forwards} - quiet)
            if not quiet and chosen is None and args.get("clear", "none") == "none":
                self._check_retained(forwards)
            if not last:
                self._give_up(args.get("give_up", []), forwards)
        if not args.get("no_optimizer"):
            for m in sorted({f.model for f in forwards} - self.apart):
                self.optimizers[m].step()

    # --- which step it is ---

    def _forwards(self, args: dict[str, Any]) -> list[Forward]:
        result = []
        for each in args.get("forwards", [{}]):
            m = each.get("model", 0) % len(self.models)
            if not self.wrappers[m]:
                continue
            rows = each.get("skip", [])
            usable = rows and not self.static and not self.models[m].has("syncbn")
            # A rank whose loss does not depend on the inputs of backward() runs no backward.
            usable = usable and not args.get("inputs")
            skip = [rows[r % len(rows)] if usable else [] for r in range(self.world)]
            result.append(Forward(m, self.wrappers[m][0 if each.get("old") else -1], skip))
        return result

    def _legal(self, args: dict[str, Any], forwards: list[Forward]) -> dict[str, Any]:
        """The arguments without those that are not legal here, by rules for every rank."""
        args = dict(args)
        nets: list[Net] = [self.models[f.model] for f in forwards]

        def has(*kinds: str) -> bool:
            return any(net.has(*kinds) for net in nets)

        def without(*names: str) -> None:
            for name in names:
                args.pop(name, None)

        how = args.get("how")
        if has("syncbn"):  # the other ranks would wait in batch norm
            without(*ENDINGS, "more", "fails_locally")
        if has("buffer"):
            without("more")  # a forward broadcasts buffers
        if how == "penalty" and has("sparse"):
            without("how")
        # Without the sine, the gradient of a normalized output is zero but for rounding.
        if how in ("twice", "first", "penalty") and has("syncbn"):
            without("how")
        if self.static and how in ("twice", "first", "penalty"):
            without("how")
        if self.static or len(forwards) > 1 or self.average != "mean":
            without("inputs")
        # torch accumulates gradients that share memory incorrectly, even without a wrapper.
        if has(*SHARING):
            without("accumulate", "fails_locally")
        if any(f.model in self.buffers_differ for f in forwards):
            without("accumulate", "quiet", "fails_locally")  # not broadcast in no_sync()
        if self.average != "mean":
            # The last backward may not be of all wrappers, and the others accumulate.
            if how in ("each", "reversed") or (how == "twice" and has(*SHARING)):
                without("how")
            # Sums over ranks would be summed again. Only None drops accumulated weights.
            accumulated = all(f.model in self.apart for f in forwards)
            if args.get("clear") == ("zeros" if self.apart else "skip") or not accumulated:
                without("clear")
        self._legal_endings(args, forwards)
        several = any(len(self.wrappers[f.model]) > 1 for f in forwards)
        if self.shared or several or any(ending in args for ending in ENDINGS):
            without("quiet")
        if not args.get("accumulate"):
            without("fails_locally", "give_up", "ahead")
        if args.get("clear") == "skip" or args.get("how") in ("each", "reversed"):
            without("give_up")
        # As in torch, what no rank uses stays as it is: zeros on some ranks, None on others.
        if args.get("clear") == "zeros" and args.get("inputs"):
            without("give_up")
        # Weights of an accumulation that is given up are dropped by what its gradients show.
        used = [r for r in range(self.world) if all(self.uses(f, r) for f in forwards)]
        args["give_up"] = [rank for rank in args.get("give_up", []) if rank in used]
        if len(used) < self.world and self.average == "weighted":
            without("quiet")
        if args.get("ahead") or args.get("inputs"):
            without("fails_locally")
        how = args.get("how")
        if how == "penalty":  # calls autograd.grad()
            without("checkpoint", "chain", "fails_locally")
        if args.get("checkpoint", "").startswith("reentrant"):
            # The same number of uses in each backward as in the first.
            if len(forwards) > 1 or args.get("inputs") or any(net.reuses() for net in nets):
                args["checkpoint"] = "non-" + args["checkpoint"]
            elif how == "twice":
                without("how")
        return args

    def _legal_endings(self, args: dict[str, Any], forwards: list[Forward]) -> None:
        first = next((ending for ending in ENDINGS if ending in args), None)
        for ending in ENDINGS:
            if ending != first:
                args.pop(ending, None)
        if first is None:
            return
        wrapper, m = forwards[0].wrapper, forwards[0].model
        ranks = args["raises"]["ranks"] if first == "raises" else args[first]
        ranks = [rank for rank in ranks if rank < self.world]
        legal = bool(ranks)
        if first != "raises":
            legal &= len(forwards) == 1 and wrapper is self.wrappers[m][-1] and not self.shared
            args[first] = ranks
        else:
            args["raises"] = {**args["raises"], "ranks": ranks}
        if first == "infinite":
            legal &= wrapper.check_finite and self.average != "weighted" and not args.get("tiny")
            legal &= self.tolerance < 1e-3  # no hook, which would see it first
            legal &= any(self.uses(forwards[0], rank) for rank in ranks)
        if first == "freeze_alone":
            trained = [p for p in plain_parameters(self.models[m]) if p.requires_grad]
            legal &= not self.static and len(ranks) < self.world and len(trained) > 1
            legal &= self.on_failure == "raise"
        if not legal:
            args.pop(first)
        else:
            for name in ("inputs", "fails_locally", "give_up"):
                args.pop(name, None)

    def _chosen(self, args: dict[str, Any], forwards: list[Forward]) -> set[int] | None:
        """The parameters that backward(inputs=) names."""
        trained = [p for p in plain_parameters(self.models[forwards[0].model]) if p.requires_grad]
        which = args.get("inputs")
        if not which or not trained:
            return None
        return {id(trained[i % len(trained)]) for i in which}

    def weights(self, args: dict[str, Any], micro: int) -> list[float]:
        if self.average != "weighted":
            return [1.0] * self.world
        rows = args.get("weights") or [[1.0]]
        row = rows[micro % len(rows)] or [1.0]
        return [row[r % len(row)] for r in range(self.world)]

    def uses(self, forward: Forward, rank: int, before: int | None = None) -> bool:
        """Whether a rank's gradients depend on its blocks up to ``before``."""
        frozen = {id(p) for p in self.frozen}
        return any(
            id(p) not in frozen
            for i, block in enumerate(self.models[forward.model].blocks[:before])
            if i not in forward.skip[rank]
            for p in plain_parameters(block)
        )

    # --- forwards and backwards ---

    def run_forwards(
        self,
        uid: int,
        args: dict[str, Any],
        forwards: list[Forward],
        micro: int,
        boom: dict[str, Any] | None = None,
    ) -> list[Tensor]:
        outputs: list[Any] = []
        inputs: list[Tensor] = []
        raising = None
        if boom and self.rank in boom["ranks"]:
            raising = boom["forward"] % len(forwards)
        for index, forward in enumerate(forwards):
            x, ids = data(uid, self.rank, micro, index)
            if args.get("chain") and outputs and not self.planted("chain"):
                x = outputs[-1].last
            inputs.append(x)
            skip = [] if self.planted("skip") else forward.skip[self.rank]
            at = None
            if raising == index and boom:
                at = boom["block"] % len(self.models[forward.model].blocks)
            outputs.append(forward.wrapper(x, ids, skip, args.get("checkpoint"), at))
            self.synchronized(forward.model, forward=True)
            if args.get("collective"):
                sums = torch.full((3,), self.rank + 1.0)
                dist.all_reduce(sums)
                check(sums[0] == self.world * (self.world + 1) / 2, f"the user's sum is {sums}")
        if self.rank in args.get("hold", []):
            self.held.append(outputs[-1])
        how = "sum" if self.planted("backwards") else args.get("how", "sum")
        todo = losses(outputs, inputs, {} if self.planted("tiny") else args, how)
        return [loss * self.weights(args, micro)[self.rank] for loss in todo]

    def _micro_batch(
        self,
        uid: int,
        args: dict[str, Any],
        forwards: list[Forward],
        micro: int,
        todo: list[Tensor] | None,
        quiet: set[int],
        chosen: set[int] | None = None,
        alone: dict[str, Any] | None = None,
    ) -> None:
        """Forwards and backwards. The wrappers of models in ``quiet`` do not communicate, and
        ``alone`` lists ranks that fail while none does. They continue with what they had."""
        how = args.get("quiet_how", "no_sync")
        kept: list[tuple[nn.Parameter, Tensor | None]] = []
        fails = bool(alone) and self.rank in alone["ranks"]
        if fails:
            parameters = plain_parameters(self.models)
            kept = [(p, None if p.grad is None else p.grad.clone()) for p in parameters]
        with contextlib.ExitStack() as stack:
            early = args.get("weighs") != "backward" and todo is None
            if early:
                self.weigh(stack, args, forwards, micro)
            if how != "backward":
                self._quieten(stack, quiet, how)
            if todo is None:
                todo = self.run_forwards(uid, args, forwards, micro, alone)
            if how == "backward":
                self._quieten(stack, quiet, how)
            if not early:
                self.weigh(stack, args, forwards, micro)
            try:
                self._backwards(todo, forwards, chosen)
            except Boom:
                check(fails, "an exception of another rank")
                for parameter, grad in kept:
                    parameter.grad = grad
            else:
                check(not fails, "the exception in backward was lost")
            todo.clear()

    def _backwards(
        self, todo: list[Tensor], forwards: list[Forward], chosen: set[int] | None = None
    ) -> None:
        inputs = None
        if chosen is not None and not self.planted("inputs"):
            inputs = [p for p in plain_parameters(self.models) if id(p) in chosen]
        for i, loss in enumerate(todo):
            last = i + 1 == len(todo)
            with contextlib.ExitStack() as stack:
                if not last and self.average != "mean":  # sums over ranks would be summed again
                    self._quieten(stack, {f.model for f in forwards}, "no_sync")
                loss.backward(retain_graph=not last, inputs=inputs)

    def _quieten(self, stack: contextlib.ExitStack, quiet: set[int], how: str) -> None:
        if self.planted("accumulate"):
            return
        for wrapper in (wrapper for m in sorted(quiet) for wrapper in self.wrappers[m]):
            if not wrapper.require_backward_grad_sync:
                continue
            if how == "disable":
                wrapper.disable_allreduce()
                stack.callback(wrapper.enable_allreduce)
            elif how == "attribute":
                wrapper.require_backward_grad_sync = False
                stack.callback(setattr, wrapper, "require_backward_grad_sync", True)
            else:
                stack.enter_context(wrapper.no_sync())
                if how == "nested":
                    with wrapper.no_sync():
                        pass

    def weigh(
        self, stack: contextlib.ExitStack, args: dict[str, Any], forwards: list[Forward], micro: int
    ) -> None:
        if self.average != "weighted":
            return
        weight: Any = self.weights(args, micro)[self.rank]
        if self.planted("weights") and self.rank == 0:
            weight += 1
        if args.get("weighs") == "tensor":
            weight = torch.tensor(weight)
        elif weight == int(weight):
            weight = int(weight)
        for wrapper in {id(f.wrapper): f.wrapper for f in forwards}.values():
            stack.enter_context(wrapper.weight(weight))

    def _clear(self, how: str) -> None:
        if how == "skip":
            return
        if how == "none":
            self.apart.clear()
        self.reference.clear(how)
        if not self.planted("clear"):
            self.models.zero_grad(set_to_none=how == "none")

    def _give_up(self, ranks: list[int], forwards: list[Forward]) -> None:
        for m in {f.model for f in forwards}:
            if self.rank in ranks and not self.planted("give_up"):
                self.models[m].zero_grad()
            some = [rank for rank in ranks if rank < self.world]
            self.reference.give_up(m, plain_parameters(self.models[m]), some)

    def forget_gradients(self, only_apart: bool = False) -> None:
        if not only_apart or self.apart:
            self._clear("none")
            self.reference.forget()

    def _check_retained(self, forwards: list[Forward]) -> None:
        """With retain_allreduce_buffers, gradients lie in the buffers, used by this rank or not."""
        for wrapper in (f.wrapper for f in forwards if f.wrapper is self.wrappers[f.model][-1]):
            if not wrapper.retain_allreduce_buffers or self.shared:
                continue
            buffers = [b for b in wrapper.allreduce_buffers if not b.is_sparse]
            ends = [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in buffers]
            for name, p in wrapper.module.named_parameters():
                if p.grad is not None and p.requires_grad and not p.grad.is_sparse:
                    at = p.grad.data_ptr()
                    inside = any(a <= at and at + p.grad.nbytes <= b for a, b in ends)
                    check(inside or not p.numel(), f"{name}'s gradient is in no retained buffer")

    def _spoil(self, args: dict[str, Any]) -> None:
        """Faults for the tests of the generator."""
        if args.get("waits", -1) == self.rank:
            dist.recv(torch.zeros(1))
        everywhere = self.planted("gradients")
        if not everywhere and args.get("sabotage", -1) != self.rank:
            return
        for parameter in self.models.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.25)
                if not parameter.grad.is_sparse:
                    parameter.grad.add_(0.1)

    # --- ranks without data ---

    def join(self, op: Any) -> None:
        """Each rank runs its own number of steps under join()."""
        m = op.args.get("model", 0) % len(self.models)
        net = self.models[m]
        counts = op.args.get("counts", [])
        trains = any(p.requires_grad for p in net.parameters())
        if not (counts and trains and self.wrappers[m]) or self.shared or self.static:
            return
        if net.has("syncbn") or self.python or m in self.changed | self.recast:
            return
        del self.wrappers[m][:-1]
        wrapper = self.wrappers[m][-1]
        if wrapper is self.hooked or m in self.buffers_differ:
            return
        self.forget_gradients()
        counts = [counts[r % len(counts)] for r in range(self.world)]
        forward = self._forwards({"forwards": [{"model": m}]})[:1]
        with wrapper.join():
            for step in range(counts[self.rank]):
                args = {"weights": op.args.get("weights"), "clear": "none"}
                uid = op.uid + step
                self._clear("none")
                self.reference.size.clear()
                self._micro_batch(uid, args, forward, 0, None, set())
                self._spoil(args)
                if self.checks:
                    active = [step < count for count in counts]
                    self.reference.backward(
                        self.models, forward, uid, 0, args, "sum", self.weights(args, 0), {m},
                        active, None,
                    )  # fmt: skip
                    with self._told_at_end():
                        what = f"step {step} under join()"
                        self.reference.compare(self.rank, net, what, self.tolerance)
                self.optimizers[m].step()
        self.forget_gradients()
        self.new_optimizers()  # ranks that ended early have other momenta

    @contextlib.contextmanager
    def _told_at_end(self) -> Iterator[None]:
        """Continue the operation, because the other ranks do."""
        try:
            yield
        except AssertionError as wrong:
            self.wrong = self.wrong or str(wrong)
