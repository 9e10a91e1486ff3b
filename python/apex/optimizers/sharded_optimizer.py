# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer: each rank steps its share of the parameters and receives the others' shares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from apex import _core
from apex._internal import joining
from apex._internal.group_names import name_of
from apex._internal.groups import end_groups_at_exit, require_group
from apex._internal.optimizer_steps import taking_parts
from apex._internal.untraced import untraced
from apex._internal.wrapped_optimizer import WrappedOptimizer

from .fused_lamb import FusedLAMB

# Note [One list of groups]
#
# The inner optimizer is a plain one of all parameters, and its groups are this optimizer's groups:
# what schedulers, loss scalers and clipping see. During a step its groups hold this rank's
# parameters only, so state exists only for them. A rank owns positions in the groups, so a script
# (or amp) may replace a parameter there on every rank.


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


class ShardedOptimizer(WrappedOptimizer):
    """An optimizer whose work and state are sharded among the ranks of a process group.

    Each rank steps some of the parameters and receives the others from the ranks that have stepped
    them. So n ranks do the work of one optimizer once instead of n times, and each keeps 1/n of its
    state. Every rank has all gradients, as after a backward of DistributedDataParallel. Clipping,
    loss scaling, accumulation, hooks and schedulers therefore work as with the plain optimizer, and
    the parameters are bitwise equal to those of the plain optimizer. The signature is that of
    ``torch.distributed.optim.ZeroRedundancyOptimizer``, so only the import changes::

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
        for x, y in loader:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()
        optimizer.consolidate_state_dict(to=0)  # on every rank
        if rank == 0:
            torch.save(optimizer.state_dict(), "optimizer.pt")

    Parameters are not split. The largest remaining one goes to the rank with the fewest elements.

    Algorithm: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2019), stage 1.

    Args:
        params: parameters, groups, or pairs of name and parameter, as for every optimizer; the
            same on every rank. The constructor broadcasts rank 0's values.
        optimizer_class: the class of the optimizer, or a function ``(params, **defaults)``.
        process_group: the ranks that share the work; default: the default group.
        parameters_as_bucket_view: for ZeroRedundancyOptimizer's scripts; has no effect.
        overlap_with_ddp: must be False.
        **defaults: passed to ``optimizer_class``.

    Raises:
        TypeError, ValueError: for arguments of other types or values, for parameters that share
            memory, and for LBFGS, whose step involves all parameters.
        RuntimeError: if the ranks hold different parameters, or there is no process group.

    Construction, :meth:`step`, :meth:`add_param_group` and :meth:`consolidate_state_dict` are
    collective: every rank must call them in the same order. Not thread safe.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        del parameters_as_bucket_view
        if not callable(optimizer_class):
            raise TypeError(
                "optimizer_class must be the class of an optimizer, such as torch.optim.AdamW, "
                f"got {type(optimizer_class).__name__}."
            )
        if overlap_with_ddp:
            raise ValueError("overlap_with_ddp=True: steps are taken in step(); leave it out.")
        self.process_group = require_group(process_group, "ShardedOptimizer")
        self._rank = dist.get_rank(self.process_group)
        inner = optimizer_class(params, **defaults)
        name = type(inner).__name__
        if not isinstance(inner, torch.optim.Optimizer):
            raise TypeError(f"optimizer_class made a {name}, no optimizer.")
        if isinstance(inner, (torch.optim.LBFGS, ShardedOptimizer)):
            raise ValueError(f"a step of {name} cannot be sharded: use it as it is.")
        super().__init__(inner)
        taking_parts.add(inner)  # only steps of this object count
        #: The owner of each parameter, in the order of the groups.
        self._owners: list[int] = []
        self._whole_state: dict[Tensor, Any] | None = None  # from consolidate_state_dict()
        end_groups_at_exit(self)
        plain = (int, float, str, tuple, type(None))
        settings = [f"{key}={value}" for key, value in defaults.items() if isinstance(value, plain)]
        self._assign([f"optimizer_class={name}", *settings])

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _assign(self, settings: list[str]) -> None:
        """Compare the parameters without an owner between ranks, and give them owners."""
        every, known = self._parameters(), len(self._owners)
        new = every[known:]
        names = [
            name
            for i, group in enumerate(self.param_groups)
            for name in group.get("param_names")
            or (f"{i}.{j}" for j, _ in enumerate(group["params"]))
        ][known:]
        group = name_of(self.process_group)
        _core.verify_same_model(names, new, settings, group)
        seen: dict[int, int] = {}
        for i, p in enumerate(every):
            address = p.data_ptr()
            if p.numel() == 0 or (not address and not p.requires_grad):
                continue
            if address and seen.setdefault(address, i) == i:
                continue
            why = "shares memory with another one" if address else "has no memory of its own"
            raise ValueError(
                f"rank {self._rank}: parameter '{names[i - known]}' {why}, so it cannot be "
                "sharded: pass each parameter once, and no tensor subclass or meta tensor."
            )
        _core.broadcast_coalesced(new, group, 0, "broadcast of a ShardedOptimizer's parameters")
        costs = [p.numel() if p.requires_grad else 0 for p in new]
        self._owners += _core.assign_owners(costs, dist.get_world_size(self.process_group))
        for p, owner in zip(every, self._owners, strict=True):
            if owner != self._rank:
                self.state.pop(p, None)  # Adagrad's constructor creates state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are shared out separately. Collective."""
        self.optim.add_param_group(param_group)
        self._whole_state = None
        try:
            self._assign([])
        except BaseException:
            del self.param_groups[-1]
            raise

    @contextlib.contextmanager
    def _own_parameters(self) -> Iterator[None]:
        """The groups hold only this rank's parameters inside."""
        lists = [group["params"] for group in self.param_groups]
        if isinstance(self.optim, FusedLAMB):
            self.optim._clipped = lists
        owners = iter(self._owners)
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if next(owners) == self._rank]
        try:
            yield
        finally:
            for group, whole in zip(self.param_groups, lists, strict=True):
                group["params"] = whole

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's parameters and receive the others. Collective.

        Blocks the host for parameters on the CPU; over NCCL, it is enqueued on the current stream.
        After an error on any rank, the process group can no longer be used, and ranks may have
        parameters of different steps: restart from a checkpoint. Over NCCL, a later collective
        raises the error on the other ranks.

        Args:
            closure: evaluated first, once.

        Returns:
            The result of ``closure``.

        Raises:
            RuntimeError: if another rank has ended or failed, and under ``join()``.
        """
        if joining.active():
            raise RuntimeError(
                "a ShardedOptimizer needs every rank, and under join() some have run out of data: "
                "use the plain optimizer there."
            )
        group = name_of(self.process_group)
        result = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            self._whole_state = None
            with self._own_parameters():
                self.optim.step()
        except BaseException as error:
            why = f"a step of a ShardedOptimizer: {type(error).__name__}: {error}"
            _core.fail_group(group, why)
            raise
        stepped = [
            (p, owner)
            for p, owner in zip(self._parameters(), self._owners, strict=True)
            if p.requires_grad or p.grad is not None
        ]
        _core.broadcast_from_owners(
            [p for p, _ in stepped],
            [owner for _, owner in stepped],
            group,
            "publication of a ShardedOptimizer's step",
        )
        return result

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collect the state of all ranks for :meth:`state_dict`. Collective; blocks the host.

        Args:
            to: the rank of ``process_group`` that receives it, on its CPU; None: every rank.

        Raises:
            ValueError: there is no such rank.
        """
        world = dist.get_world_size(self.process_group)
        if to is not None and (type(to) is not int or not 0 <= to < world):
            raise ValueError(f"to={to!r}: there are ranks 0 to {world - 1}, or None for all.")
        # refuses a group that has failed, which torch's collectives do not
        _core.verify_same_model([], [], [f"to={to}"], name_of(self.process_group))
        parameters = self._parameters()
        mine = {
            i: {name: _to_cpu(value) for name, value in self.state[p].items()}
            for i, p in enumerate(parameters)
            if p in self.state
        }
        group = self.process_group
        found: list[Any] | None = [None] * world
        if to is None:
            dist.all_gather_object(found, mine, group)
        else:
            found = found if dist.get_rank(group) == to else None
            dist.gather_object(mine, found, dst=dist.get_global_rank(group, to), group=group)
        self._whole_state = None
        if found is not None:
            self._whole_state = {parameters[i]: held for of in found for i, held in of.items()}

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state dict, on the ranks that :meth:`consolidate_state_dict` chose.

        Raises:
            RuntimeError: on other ranks, and if a step was taken since then.
        """
        if self._whole_state is None:
            raise RuntimeError(
                f"rank {self._rank} has the state of its own share only: call "
                "consolidate_state_dict(to=rank) on every rank after the last step, and "
                "state_dict() on that rank; to=None collects it on all."
            )
        own, self.state = self.state, self._whole_state
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the plain optimizer, or of a ShardedOptimizer with any number of
        ranks. Each rank keeps its share.

        Raises:
            ValueError: the state belongs to other groups.
        """
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        owners = dict(zip(keys, self._owners, strict=False))
        held = state_dict["state"].items()
        state = {k: v for k, v in held if owners.get(k, self._rank) == self._rank}
        super().load_state_dict({**state_dict, "state": state})
        self._whole_state = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ShardedOptimizer is one of several ranks, and cannot be copied or pickled: use "
            "state_dict()."
        )
