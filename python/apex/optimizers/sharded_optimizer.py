# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer: each rank steps its share of the parameters, and gets the others'."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from apex import _core
from apex._internal import joining
from apex._internal.group_names import name_of
from apex._internal.groups import require_group
from apex._internal.optimizer_steps import taking_parts

from ._fused import implementation
from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_sgd import FusedSGD

# Note [Two optimizers]
#
# What a script sees is this optimizer: its groups hold all parameters, with their full gradients,
# so that schedulers, clipping, loss scalers and hooks find what they expect. The one inside holds
# this rank's pieces: parameters, and flat tensors on a part of the memory of one that is cut
# (_core.ParameterShards). Before a step the settings of the groups are copied to it, and afterwards
# what it changed there (some count their steps in a group) is copied back.
#
# Parameters that are added later are shared out for themselves: what was stepped before stays
# where its state is. All are published together: after a failure all are those before the step.

#: An element's step depends on nothing but that element: these may be cut anywhere.
ELEMENTWISE: frozenset[Any] = frozenset(
    {
        *(
            getattr(torch.optim, name)
            for name in (
                "ASGD",
                "Adadelta",
                "Adagrad",
                "Adam",
                "AdamW",
                "Adamax",
                "NAdam",
                "RAdam",
                "RMSprop",
                "Rprop",
                "SGD",
            )
        ),
        FusedAdagrad,
        FusedAdam,
        FusedSGD,
    }
)
#: By name, of optimizers that multiply matrices: the cost of a step of one parameter.
_MATRIX_OPTIMIZERS = ("Muon", "Shampoo", "SOAP")

Piece = tuple[int, int, int]


def _named(kind: Any, names: Iterable[str]) -> bool:
    kinds = kind.__mro__ if inspect.isclass(kind) else ()
    return any(name in one.__name__ for one in kinds for name in names)


def _default_cost(kind: Any) -> Callable[[Tensor], float]:
    if not _named(kind, _MATRIX_OPTIMIZERS):
        return lambda parameter: float(parameter.numel())
    # Products of an m x n matrix with its m x m or n x n Gram matrix, the smaller one.
    return lambda parameter: float(
        parameter.numel() * min(parameter.shape[0], parameter.numel() // max(parameter.shape[0], 1))
        if parameter.ndim > 1
        else parameter.numel()
    )


class _Shares:
    """The parameters of all groups, and who steps them."""

    def __init__(
        self, group: dist.ProcessGroup, cost: Callable[[Tensor], float], whole: bool
    ) -> None:
        self.group = group
        self.cost = cost
        self.whole = whole
        self.core: Any = None
        self.parameters: list[Tensor] = []
        self.kinds: list[tuple[Any, ...]] = []
        #: What this rank steps, each with its piece.
        self.own: list[tuple[Tensor, Piece]] = []

    def add(self, groups: list[dict[str, Any]]) -> None:
        """The parameters of these groups, shared out for themselves. Collective."""
        parameters = [p for group in groups for p in group["params"]]
        names: list[str] = []
        for i, group in enumerate(groups):
            given = group.get("param_names")
            names += given if given else [f"{i}.{j}" for j in range(len(group["params"]))]
        costs = [float(self.cost(p)) if p.requires_grad else 0.0 for p in parameters]
        if self.core is None:
            self.core = _core.ParameterShards(
                names, parameters, name_of(self.group), costs, self.whole
            )
        else:
            self.core.add(names, parameters, costs)
        self.parameters += parameters
        self.kinds += [_kind_of(p) for p in parameters]
        pieces: list[Piece] = self.core.shards()[dist.get_rank(self.group)]
        self.own = list(zip(self.core.tensors(), pieces, strict=True))

    def of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """What this rank steps of these parameters, in their order."""
        wanted = {id(p) for p in parameters}
        return [t for t, piece in self.own if id(self.parameters[piece[0]]) in wanted]


def _kind_of(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.dtype, parameter.device, parameter.shape


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _take_defaults(group: dict[str, Any], of_inner: dict[str, Any]) -> None:
    """Settings that a group was not given are those of the optimizer inside."""
    for name, value in _settings(of_inner).items():
        group.setdefault(name, value)


def _as_text(value: Any) -> str:
    """What ranks compare: numbers, and what consists of them."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_as_text, value))})"
    return repr(value) if isinstance(value, (int, float, str, type(None))) else "..."


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose work and state are shared out among the ranks of a process group.

    Each rank steps its share of the parameters, and gets the others' share from those who have
    stepped it: between processes of one host through shared memory. So n ranks do the work of one
    optimizer once, not n times, and each keeps 1/n of its state. Gradients are those of every rank,
    as DistributedDataParallel leaves them: clipping, loss scaling, accumulation, hooks and
    schedulers work as they do with the plain optimizer. The call is that of
    ``torch.distributed.optim.ZeroRedundancyOptimizer``, so that one import changes::

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
        for x, y in loader:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()
        optimizer.consolidate_state_dict(to=0)  # on every rank
        if rank == 0:
            torch.save(optimizer.state_dict(), "optimizer.pt")

    Optimizers that treat each element by itself (:data:`ELEMENTWISE`: those of torch,
    ``FusedAdam``, ``FusedSGD``, ``FusedAdagrad``) get runs of elements, the same number on every
    rank; the parameters are bit for bit those of the plain optimizer. Others, such as Muon, LAMB or
    one of your own, get whole parameters, shared out by what they cost.

    Algorithm: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2019), stage 1.

    Args:
        params: parameters, or groups, or pairs of name and parameter, as for every optimizer; the
            same on every rank. Strided, on any device the group has a backend for. The values are
            rank 0's afterwards.
        optimizer_class: the class of the optimizer, or a function ``(params, **defaults)``.
        process_group: whose ranks share the work; default: that of ``ddp``, or the default group.
        parameters_as_bucket_view: for ZeroRedundancyOptimizer's scripts; changes nothing.
        overlap_with_ddp: has to be False.
        ddp: the wrapper whose process group is used.
        whole_parameters: True: parameters are not cut; default: unless the class is one of
            :data:`ELEMENTWISE`.
        cost: what the step of a parameter costs, relative to others. Default: its elements, and
            for classes named Muon, Shampoo or SOAP times the smaller side of the matrix.
        **defaults: passed to ``optimizer_class``.

    Raises:
        TypeError, ValueError: arguments that are no such thing, and optimizers that cannot be
            shared out (LBFGS, whose step is one of all parameters; SparseAdam).
        RuntimeError: if the ranks hold different parameters, or there is no process group.

    Construction, :meth:`step`, :meth:`add_param_group` and :meth:`consolidate_state_dict` are
    collective: every rank has to call them in the same order. Not thread safe.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        ddp: Any = None,
        whole_parameters: bool | None = None,
        cost: Callable[[Tensor], float] | None = None,
        **defaults: Any,
    ) -> None:
        del parameters_as_bucket_view
        if not callable(optimizer_class):
            raise TypeError(
                "optimizer_class has to be the class of an optimizer, such as torch.optim.AdamW, "
                f"got {type(optimizer_class).__name__}."
            )
        if overlap_with_ddp:
            raise ValueError("overlap_with_ddp=True: steps are taken in step(); leave it out.")
        for name in ("LBFGS", "SparseAdam", "OverlappedOptimizer", "ShardedOptimizer"):
            if _named(optimizer_class, (name,)):
                raise ValueError(f"a step of {name} cannot be shared out: use it as it is.")
        if ddp is not None and not isinstance(
            getattr(ddp, "process_group", None), dist.ProcessGroup
        ):
            raise TypeError(
                "ddp has to be a DistributedDataParallel, whose process group is used, got "
                f"{type(ddp).__name__}."
            )
        if process_group is None and ddp is not None:
            process_group = ddp.process_group
        self._optimizer_class = optimizer_class
        self._group = require_group(process_group, "ShardedOptimizer")
        if not isinstance(whole_parameters, (bool, type(None))):
            raise TypeError(
                "whole_parameters must be True, False or None, got "
                f"{type(whole_parameters).__name__}."
            )
        if whole_parameters is None:
            whole_parameters = optimizer_class not in ELEMENTWISE
        self._new_shares = functools.partial(
            _Shares, self._group, cost or _default_cost(optimizer_class), whole_parameters
        )
        self._inner_defaults = defaults
        self._inner: torch.optim.Optimizer | None = None
        self._has_state = False  # by a step or a state dict: Adagrad's constructor makes some, too
        #: Settings that steps change. Some optimizers count in a group where they step some of it.
        self._counted: set[str] = set()
        self._whole_settings: list[dict[str, Any]] = []  # beside it, of the groups
        self._whole_state: dict[int, Any] | None = None  # of consolidate_state_dict()
        super().__init__(params, dict(defaults))
        self._share_out()

    # --- who steps what ---

    @property
    def state(self) -> Any:
        """The state of this rank's pieces, by tensor."""
        return {} if self._inner is None else self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        """Torch's constructor sets an empty one."""

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's pieces."""
        assert self._inner is not None
        return self._inner

    def _share_out(self) -> None:
        """Everything anew: at first, and when amp has put master weights in place of parameters."""
        shares = self._new_shares()
        shares.add(self.param_groups)
        groups = [
            {**_settings(group), "params": shares.of(group["params"])}
            for group in self.param_groups
        ]
        inner = self._make_inner(groups)
        self._shares = shares
        self._inner = inner
        if isinstance(inner, FusedLAMB):
            me = weakref.ref(self)
            inner._normed = lambda: [  # type: ignore[method-assign]
                group["params"] for one in (me(),) if one is not None for group in one.param_groups
            ]
        if isinstance(inner, (FusedAdam, FusedSGD)):  # they choose by all parameters
            kernels = implementation(self.param_groups)
            for settings in (inner.defaults, *inner.param_groups):
                settings.update({name: kernels.get(name) for name in ("fused", "foreach")})
        taking_parts.add(inner)  # only steps of this object count
        self.defaults = inner.defaults
        for group, of_inner in zip(self.param_groups, inner.param_groups, strict=True):
            _take_defaults(group, of_inner)

    def _make_inner(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """What one rank's parameters alone are refused for, the others hear of."""
        refused: Exception | None = None
        inner: Any = None
        try:
            inner = self._optimizer_class(groups, **self._inner_defaults)
            if not isinstance(inner, torch.optim.Optimizer):
                raise TypeError(f"optimizer_class made a {type(inner).__name__}, not an optimizer.")
            if isinstance(inner, torch.optim.LBFGS):
                raise ValueError("a step of LBFGS cannot be shared out: use it as it is.")
        except Exception as error:
            refused = error
        said = [f"optimizer_class={type(inner).__name__}"]
        said += [f"{name}={_as_text(value)}" for name, value in self._inner_defaults.items()]
        if refused is not None:
            said = [f"optimizer_class=(refused: {type(refused).__name__})"]
        try:
            _core.verify_same_model([], [], said, name_of(self._group))
        except RuntimeError:
            if refused is None:
                raise
        if refused is not None:
            raise refused
        return inner  # type: ignore[no-any-return]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, which are shared out for themselves. Collective."""
        super().add_param_group(param_group)
        if self._inner is None:  # torch's constructor
            return
        self._whole_state = None
        group = self.param_groups[-1]
        try:
            self._shares.add([group])
        except BaseException:
            del self.param_groups[-1]
            raise
        self._inner.add_param_group(
            {**_settings(group), "params": self._shares.of(group["params"])}
        )
        _take_defaults(group, self._inner.param_groups[-1])

    def _follow_groups(self) -> None:
        """What was put in place of parameters is shared out, if nothing has been stepped yet."""
        held = self._shares.parameters
        given = self._everything()
        same = len(held) == len(given) and all(a is b for a, b in zip(held, given, strict=True))
        if same and (self._has_state or self._shares.kinds == [_kind_of(p) for p in held]):
            return
        if self._has_state:
            raise RuntimeError(
                "the parameters in the groups of a ShardedOptimizer were replaced after its first "
                "step, so their state is lost: replace them before, or make a new optimizer."
            )
        self._share_out()

    # --- steps ---

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps this rank's pieces and gets those of the others. Collective; blocks the host.

        On an error, this rank's or another's, the parameters are those before the step (with one
        rank they may be stepped), and the process group cannot be used any more.

        Args:
            closure: evaluated first, once.

        Returns:
            What ``closure`` returns.

        Raises:
            ValueError: for a sparse gradient, or a parameter that has another dtype or device.
            RuntimeError: if another rank has ended or failed, and under ``join()``.
        """
        if joining.current() is not None:
            raise RuntimeError(
                "a step of a ShardedOptimizer needs every rank, and under join() some have run out "
                "of data: use the plain optimizer there."
            )
        result = None
        core = self._shares.core
        try:
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            self._whole_state = None
            self._follow_groups()
            core, inner = self._shares.core, self.optim
            for group, of_inner in zip(self.param_groups, inner.param_groups, strict=True):
                of_inner.update(_settings(group))
            self._has_state = True
            core.take_gradients()
            try:
                inner.step()
            finally:
                core.drop_gradients()
        except BaseException as error:
            core.give_up(f"{type(error).__name__}: {error}")
            raise
        core.publish()
        for group, of_inner in zip(self.param_groups, inner.param_groups, strict=True):
            changed = {k: v for k, v in _settings(of_inner).items() if v is not group.get(k)}
            self._counted.update(changed)
            group.update(changed)
        return result

    # --- checkpoints ---

    def _everything(self) -> list[Tensor]:
        """All parameters, as a state dict numbers them."""
        return [p for group in self.param_groups for p in group["params"]]

    def _places(self) -> dict[int, int]:
        """The number of each parameter in a state dict, by its id."""
        return {id(p): i for i, p in enumerate(self._everything())}

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Collects the state of all ranks, for :meth:`state_dict`. Collective; blocks the host.

        Args:
            to: the rank of the group that gets it, on its CPU; None: every rank.

        Raises:
            ValueError: there is no such rank.
        """
        world = dist.get_world_size(self._group)
        if to is not None and (not isinstance(to, int) or not 0 <= to < world):
            raise ValueError(f"to={to!r}: there are ranks 0 to {world - 1}, or None for all.")
        places = self._places()
        parameters = self._shares.parameters
        pieces_here = [
            (places[id(parameters[piece[0]])], piece[1:], {k: _to_cpu(v) for k, v in held.items()})
            for tensor, piece in self._shares.own
            if (held := self.state.get(tensor))
        ]
        settings = [
            {k: _to_cpu(group[k]) for k in self._counted if k in group}
            if of_inner["params"]
            else None
            for group, of_inner in zip(self.param_groups, self.optim.param_groups, strict=True)
        ]
        mine = (pieces_here, settings)
        rank = dist.get_rank(self._group)
        everything: list[Any] | None = [None] * world if to in (None, rank) else None
        if to is None:
            assert everything is not None
            dist.all_gather_object(everything, mine, group=self._group)
        else:
            dist.gather_object(
                mine, everything, dst=dist.get_global_rank(self._group, to), group=self._group
            )
        if everything is None:
            self._whole_state = None
            return
        pieces: dict[int, list[tuple[tuple[int, int], dict[str, Any]]]] = {}
        for of_rank, _ in everything:
            for place, span, held in of_rank:
                pieces.setdefault(place, []).append((span, held))
        ordered = self._everything()
        self._whole_settings = [
            next((of_rank[1][i] for of_rank in everything if of_rank[1][i]), {})
            for i in range(len(self.param_groups))
        ]
        self._whole_state = {
            place: _joined(ordered[place], sorted(found, key=lambda one: one[0]))
            for place, found in sorted(pieces.items())
        }

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the plain optimizer, where :meth:`consolidate_state_dict` put it.

        Raises:
            RuntimeError: on other ranks, and if a step was taken since.
        """
        if self._whole_state is None:
            raise RuntimeError(
                f"rank {dist.get_rank(self._group)} has the state of its own share only: call "
                "consolidate_state_dict(to=rank) on every rank after the last step, and "
                "state_dict() on that rank; to=None collects it on all."
            )
        for pre_hook in list(self._optimizer_state_dict_pre_hooks.values()):
            pre_hook(self)
        places = self._places()
        groups = [
            {
                **{k: v for k, v in group.items() if k != "params"},
                **found,
                "params": [places[id(p)] for p in group["params"]],
            }
            for group, found in zip(self.param_groups, self._whole_settings, strict=True)
        ]
        result: dict[str, Any] = {"state": self._whole_state, "param_groups": groups}
        for hook in list(self._optimizer_state_dict_post_hooks.values()):
            replaced = hook(self, result)
            result = result if replaced is None else replaced
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state dict of the plain optimizer, or of a ShardedOptimizer of any number of
        ranks: each rank keeps its share.

        Raises:
            ValueError: it is of other groups, or the state of a parameter that is cut has another
                shape than the parameter.
        """
        for hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._follow_groups()
        self._whole_state = None
        loaded, state = state_dict["param_groups"], state_dict["state"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in loaded] != sizes:
            found = [len(group["params"]) for group in loaded]
            raise ValueError(
                f"the state dict has groups of {found} parameters, this optimizer of {sizes}."
            )
        keys = [key for group in loaded for key in group["params"]]
        places = self._places()
        inner = self.optim
        own = {id(t): (self._shares.parameters[piece[0]], piece) for t, piece in self._shares.own}
        local: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        count = 0
        for of_inner, group in zip(inner.param_groups, loaded, strict=True):
            numbers = []
            for tensor in of_inner["params"]:
                parameter, piece = own[id(tensor)]
                key = keys[places[id(parameter)]]
                if key in state:
                    local[count] = _cut(parameter, piece[1:], state[key], key)
                numbers.append(count)
                count += 1
            groups.append({**_settings(of_inner), **_settings(group), "params": numbers})
        inner.load_state_dict({"state": local, "param_groups": groups})
        self._has_state = True
        for group, of_inner in zip(self.param_groups, inner.param_groups, strict=True):
            group.update(_settings(of_inner))
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ShardedOptimizer is one of several ranks, and cannot be copied or pickled: use "
            "state_dict()."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"


def _in_its_order(parameter: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A new tensor of the kind of `value` and the layout of `parameter`, and its flat memory."""
    whole = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device
    )
    return whole, whole.as_strided((parameter.numel(),), (1,))


def _joined(
    parameter: Tensor, pieces: list[tuple[tuple[int, int], dict[str, Any]]]
) -> dict[str, Any]:
    """The state of a parameter, of that of its pieces."""
    if len(pieces) == 1 and pieces[0][0] == (0, parameter.numel()):
        return pieces[0][1]
    result: dict[str, Any] = {}
    for name, first in pieces[0][1].items():
        begin, end = pieces[0][0]
        if not isinstance(first, Tensor) or first.numel() != end - begin or first.ndim == 0:
            result[name] = first
            continue
        whole, flat = _in_its_order(parameter, first)
        for (begin, end), held in pieces:
            flat[begin:end] = held[name]
        result[name] = whole
    return result


def _cut(
    parameter: Tensor, span: tuple[int, int], held: dict[str, Any], key: Any
) -> dict[str, Any]:
    """Of a parameter's state that of a piece."""
    if span == (0, parameter.numel()):
        return dict(held)
    result: dict[str, Any] = {}
    for name, value in held.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            result[name] = value
            continue
        if value.shape != parameter.shape:
            raise ValueError(
                f"the state dict has '{name}' of shape {tuple(value.shape)} for parameter {key}, "
                f"whose shape is {tuple(parameter.shape)}."
            )
        whole, flat = _in_its_order(parameter, value)
        whole.copy_(value)
        result[name] = flat[slice(*span)].clone()
    return result
