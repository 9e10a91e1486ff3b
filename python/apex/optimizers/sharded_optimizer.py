# SPDX-License-Identifier: BSD-3-Clause
"""ShardedOptimizer: each rank steps its share of the parameters and receives the others' shares."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from apex import _core
from apex._internal import joining
from apex._internal.group_names import name_of
from apex._internal.groups import (
    end_groups_at_exit,
    ranks_by_host,
    require_group,
    split,
)
from apex._internal.optimizer_steps import taking_parts
from apex._internal.sharded_masters import ShardedMaster, flat_like, published
from apex._internal.untraced import untraced

from ._fused import implementation
from ._sharded_state import ShardedState, settings_of
from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB, norm_of_gradients
from .fused_sgd import FusedSGD

# Note [Two optimizers]
#
# Scripts see this optimizer. Its groups hold all parameters with their full gradients, as
# schedulers, clipping, loss scalers and hooks expect. The inner optimizer holds this rank's pieces:
# whole parameters, and flat tensors on a part of a split parameter's memory
# (_core.ParameterShards). Before a step, the settings of the groups are copied to the inner
# optimizer. Afterwards, its changes are copied back (some optimizers count their steps in a group).
#
# Parameters added later are sharded separately, so that stepped parameters stay on the rank with
# their state. All parameters are published together, so that after a failure all have their values
# from before the step.

#: Optimizers whose step of an element depends only on that element, so parameters can be split.
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
#: Names of optimizers that multiply matrices, for which the cost of a step is estimated.
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
    """The parameters of all groups, and the rank that steps each of them."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup,
        cost: Callable[[Tensor], float],
        cut: Any,
        module: weakref.ref[torch.nn.Module] | None,
    ) -> None:
        end_groups_at_exit(self)  # `core` has connections of its own
        self.group = group
        self.replicas = replicas
        self.cost = cost
        self.cut = cut
        #: Names parameters. By position, parameters in another order on one rank would look alike.
        self.module = module
        self.core: Any = None
        #: The tensors of the groups, and the parameters whose values are published.
        self.given: list[Tensor] = []
        self.parameters: list[Tensor] = []
        self.kinds: list[tuple[Any, ...]] = []
        #: The tensors that this rank steps, with their pieces.
        self.own: list[tuple[Tensor, Piece]] = []
        #: Sharded master weights, this rank's pieces of them, and the pieces' rounding targets.
        self.masters: list[tuple[ShardedMaster, Tensor, Tensor]] = []

    def add(self, groups: list[dict[str, Any]]) -> None:
        """Shard the parameters of these groups separately. Collective."""
        given = [p for group in groups for p in group["params"]]
        parameters = list(map(published, given))
        module = None if self.module is None else self.module()
        in_module = {} if module is None else {id(p): n for n, p in module.named_parameters()}
        names: list[str] = []
        for i, group in enumerate(groups):
            named = group.get("param_names") or [
                in_module.get(id(published(p)), f"{i}.{j}") for j, p in enumerate(group["params"])
            ]
            names += named
        costs = [float(self.cost(p)) if p.requires_grad else 0.0 for p in parameters]
        if self.core is None:
            self.core = _core.ParameterShards(
                names, parameters, name_of(self.group), costs, self.cut, name_of(self.replicas)
            )
        else:
            self.core.add(names, parameters, costs)
        self.given += given
        self.parameters += parameters
        self.kinds += [_kind_of(p) for p in parameters]
        pieces: list[Piece] = self.core.shards()[dist.get_rank(self.group)]
        known = len(self.own)
        for tensor, piece in zip(self.core.tensors()[known:], pieces[known:], strict=True):
            master = self.given[piece[0]]
            if isinstance(master, ShardedMaster):
                held = master.hold(piece[1:])
                self.masters.append((master, held, tensor))
                tensor = held
            self.own.append((tensor, piece))

    def take_master(self, index: int, master: ShardedMaster, inner: torch.optim.Optimizer) -> None:
        """Step `master` instead of parameter `index`, which has no state yet."""
        self.given[index] = master
        for i, (tensor, piece) in enumerate(self.own):
            if piece[0] != index:
                continue
            held = master.hold(piece[1:])
            self.masters.append((master, held, tensor))
            self.own[i] = (held, piece)
            for group in inner.param_groups:
                group["params"] = [held if p is tensor else p for p in group["params"]]

    def of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The tensors of these parameters that this rank steps, in their order."""
        wanted = {id(p) for p in parameters}
        return [t for t, piece in self.own if id(self.given[piece[0]]) in wanted]

    def total_norm(self, norm_type: float) -> Tensor:
        """The norm of the gradients of all ranks' shares. Collective."""
        mine = []
        for _, (index, begin, end) in self.own:
            grad, parameter = self.given[index].grad, self.parameters[index]
            if grad is not None and end - begin < parameter.numel():
                grad = flat_like(parameter, grad)[begin:end]
            if grad is not None:
                mine.append(grad)
        norm: Tensor = self.core.total_norm(mine, float(norm_type))
        return norm

    def step(self, inner: torch.optim.Optimizer) -> None:
        """Step this rank's pieces."""
        self.core.take_gradients()
        try:
            for master, held, _ in self.masters:
                held.grad = None if master.grad is None else master.part(master.grad)
            inner.step()
            if self.masters:
                with torch.no_grad():
                    torch._foreach_copy_(
                        [rounded for _, _, rounded in self.masters],
                        [held for _, held, _ in self.masters],
                    )
        finally:
            self.core.drop_gradients()
            for _, held, _ in self.masters:
                held.grad = None


def _kind_of(parameter: Tensor) -> tuple[Any, ...]:
    return parameter.dtype, parameter.device, parameter.shape


def _take_defaults(group: dict[str, Any], of_inner: dict[str, Any]) -> None:
    """Fill in settings that a group does not have from the inner optimizer."""
    for name, value in settings_of(of_inner).items():
        group.setdefault(name, value)


def _as_text(value: Any) -> str:
    """Numbers, and containers of them, as text for comparison between ranks."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_as_text, value))})"
    return repr(value) if isinstance(value, (int, float, str, type(None))) else "..."


class ShardedOptimizer(ShardedState):
    """An optimizer whose work and state are sharded among the ranks of a process group.

    Each rank steps its share of the parameters and receives the other shares from the ranks that
    have stepped them; processes of one host use shared memory. So n ranks do the work of one
    optimizer once instead of n times, and each keeps 1/n of its state. By default every rank has
    all gradients, as after a backward of DistributedDataParallel. Clipping, loss scaling,
    accumulation, hooks and schedulers therefore work as with the plain optimizer. The signature is
    that of
    ``torch.distributed.optim.ZeroRedundancyOptimizer``, so only the import changes::

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
        for x, y in loader:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()
        optimizer.consolidate_state_dict(to=0)  # on every rank
        if rank == 0:
            torch.save(optimizer.state_dict(), "optimizer.pt")

    Elementwise optimizers (:data:`ELEMENTWISE`: torch's, ``FusedAdam``, ``FusedSGD``,
    ``FusedAdagrad``) get runs of elements, the same number on every rank. The parameters are
    bitwise equal to those of the plain optimizer. Other optimizers, such as Muon, LAMB or your own,
    get whole parameters, balanced by cost.

    Algorithm: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2019), stage 1; the communication of stage 2 with ``reduce_scatter``.

    Args:
        params: parameters, groups, or pairs of name and parameter, as for every optimizer; the
            same on every rank. Strided, on any device for which the group has a backend. The
            constructor broadcasts rank 0's values.
        optimizer_class: the class of the optimizer, or a function ``(params, **defaults)``.
        process_group: the ranks that train the model; default: that of ``ddp``, or the default
            group.
        parameters_as_bucket_view: for ZeroRedundancyOptimizer's scripts; has no effect.
        overlap_with_ddp: must be False.
        ddp: the wrapper whose process group is used.
        reduce_scatter: True: the gradients of ``ddp`` are reduce-scattered instead of all-reduced,
            which sends half the bytes. After backward a rank has the average of its share, and nan
            elsewhere. Clip by :meth:`clip_grad_norm_`, and clear the gradients after each step.
            Each parameter of ``ddp`` that gets a gradient must be in a ShardedOptimizer with this
            option. For ranks that communicate over a network or NCCL. Not with loss scaling
            (``apex.amp``, ``GradScaler``), or ``gradient_average=False``.
        whole_parameters: True: parameters are not split. By default they are split if the class is
            in :data:`ELEMENTWISE`.
        shard_master_weights: at level O2 of ``apex.amp``, each rank holds the float32 master
            weights of its share only. ``amp.master_params(optimizer)`` then yields tensors with
            complete gradients, for clipping, whose values read as nan; and the model's
            ``state_dict()`` has rounded values.
        across_hosts: with ranks on several hosts, False: the work is split among the ranks of each
            host, so that no parameters are sent between hosts; every host steps all parameters,
            with the same gradients. True: it is split among all n ranks, and each keeps 1/n of the
            state. Default: True if no host has several ranks.
        cost: the relative cost of a parameter's step. Default: the number of its elements; for
            classes named Muon, Shampoo or SOAP, times the smaller side of the matrix.
        **defaults: passed to ``optimizer_class``.

    Raises:
        TypeError, ValueError: for arguments of other types or values, and for optimizers that
            cannot be sharded (LBFGS, whose step involves all parameters; SparseAdam).
        RuntimeError: if the ranks hold different parameters, or there is no process group.

    Construction, :meth:`step`, :meth:`clip_grad_norm_`, :meth:`add_param_group` and
    :meth:`consolidate_state_dict` are collective: every rank must call them in the same order. Not
    thread safe.
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
        reduce_scatter: bool = False,
        whole_parameters: bool | None = None,
        shard_master_weights: bool = False,
        across_hosts: bool | None = None,
        cost: Callable[[Tensor], float] | None = None,
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
        for name in ("LBFGS", "SparseAdam", "OverlappedOptimizer", "ShardedOptimizer"):
            if _named(optimizer_class, (name,)):
                raise ValueError(f"a step of {name} cannot be sharded: use it as it is.")
        if ddp is not None and not isinstance(
            getattr(ddp, "process_group", None), dist.ProcessGroup
        ):
            raise TypeError(
                "ddp must be a DistributedDataParallel, whose process group is used, got "
                f"{type(ddp).__name__}."
            )
        if process_group is None and ddp is not None:
            process_group = ddp.process_group
        self._optimizer_class = optimizer_class
        #: All ranks that train the model.
        self._replicas = require_group(process_group, "ShardedOptimizer")
        for name, option in (
            ("shard_master_weights", shard_master_weights),
            ("reduce_scatter", reduce_scatter),
        ):
            if not isinstance(option, bool):
                raise TypeError(f"{name} must be True or False, got {type(option).__name__}.")
        if reduce_scatter and not hasattr(ddp, "_reduce_scatter"):
            raise ValueError(
                "reduce_scatter=True replaces the all-reduce of a wrapper's gradients: pass the "
                "apex.parallel.DistributedDataParallel as ddp."
            )
        engine = getattr(ddp, "_engine", None)  # torch's class has none
        if not reduce_scatter and engine is not None and engine.hooks.into_shards:
            raise ValueError(
                "the gradients of ddp are reduce-scattered for another ShardedOptimizer, so this "
                "one would step with nan: pass reduce_scatter=True, or make a new wrapper."
            )
        if not isinstance(whole_parameters, (bool, type(None))):
            raise TypeError(
                "whole_parameters must be True, False or None, got "
                f"{type(whole_parameters).__name__}."
            )
        if not isinstance(across_hosts, (bool, type(None))):
            raise TypeError(
                f"across_hosts must be True, False or None, got {type(across_hosts).__name__}."
            )
        if whole_parameters is None:
            whole_parameters = optimizer_class not in ELEMENTWISE
        elementwise = _core.Cut.EACH if reduce_scatter else _core.Cut.FEW
        #: The ranks of each host if each host steps all parameters. The first host saves them.
        self._hosts: list[list[int]] = []
        said = [f"across_hosts={across_hosts}", f"reduce_scatter={reduce_scatter}"]
        _core.verify_same_model([], [], said, name_of(self._replicas))
        self._group = self._sharing_group(across_hosts)
        if reduce_scatter and self._hosts:
            raise ValueError(
                "reduce_scatter=True on several hosts splits the work among all ranks: pass "
                "across_hosts=True."
            )
        self._new_shares = functools.partial(
            _Shares,
            self._group,
            self._replicas,
            cost or _default_cost(optimizer_class),
            _core.Cut.NEVER if whole_parameters else elementwise,
            weakref.ref(ddp) if isinstance(ddp, torch.nn.Module) else None,
        )
        self._shards_masters = shard_master_weights and dist.get_world_size(self._replicas) > 1
        self._inner_defaults = defaults
        self._inner: torch.optim.Optimizer | None = None
        # set by a step or a state dict; Adagrad's constructor also creates state
        self._has_state = False
        #: Settings that steps change. Some optimizers count their steps in a group that they step.
        self._counted: set[str] = set()
        # the settings of the groups, saved with _whole_state
        self._whole_settings: list[dict[str, Any]] = []
        self._whole_state: dict[int, Any] | None = None  # from consolidate_state_dict()
        self._in_pre_hooks = False
        self._failed = False
        super().__init__(params, dict(defaults))
        #: Whether a rank gets the gradients of its share only. ``apex.amp`` refuses this.
        self.reduces_into_shards = reduce_scatter
        self._share_out()
        if reduce_scatter:
            ddp._reduce_scatter(self._shares.core, self._shares.parameters)

    # --- the shares ---

    def _sharing_group(self, across_hosts: bool | None) -> dist.ProcessGroup:
        """The ranks among which the work is split. Collective."""
        if across_hosts:
            return self._replicas
        hosts = ranks_by_host(self._replicas)
        if len(hosts) == 1 or (across_hosts is None and max(map(len, hosts)) == 1):
            return self._replicas
        self._hosts = hosts
        return split(self._replicas, hosts, "across_hosts=False", "across_hosts=True")

    @property
    def state(self) -> Any:
        """The state of this rank's pieces, by tensor."""
        return {} if self._inner is None else self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        """Ignored: torch's constructor sets an empty state."""

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's pieces."""
        assert self._inner is not None
        return self._inner

    def _share_out(self) -> None:
        """Shard everything: at first, and when amp has replaced parameters by master weights."""
        shares = self._new_shares()
        with self._moving():
            shares.add(self.param_groups)
        groups = [
            {**settings_of(group), "params": shares.of(group["params"])}
            for group in self.param_groups
        ]
        inner = self._make_inner(groups)
        self._shares = shares
        self._inner = inner
        if isinstance(inner, FusedLAMB):
            me = weakref.ref(self)
            inner._gradient_norm = lambda: cast(  # type: ignore[method-assign]
                ShardedOptimizer, me()
            )._gradient_norm()
        if isinstance(inner, (FusedAdam, FusedSGD)):  # their kernels depend on all parameters
            kernels = implementation(self.param_groups)
            for settings in (inner.defaults, *inner.param_groups):
                settings.update({name: kernels.get(name) for name in ("fused", "foreach")})
        taking_parts.add(inner)  # only steps of this object count
        self.defaults = inner.defaults
        for group, of_inner in zip(self.param_groups, inner.param_groups, strict=True):
            _take_defaults(group, of_inner)

    def _gradient_norm(self) -> Tensor | None:
        if self.reduces_into_shards:
            total: Tensor = self._shares.total_norm(2.0)
            return total
        return norm_of_gradients([group["params"] for group in self.param_groups])

    def _moving(self) -> contextlib.AbstractContextManager[None]:
        """Sharing moves parameters, also the master weights of amp."""
        stash = getattr(self, "_amp_stash", None)
        return contextlib.nullcontext() if stash is None else stash.moving()

    def _make_inner(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Create the inner optimizer. If one rank's parameters are refused, all ranks raise."""
        refused: Exception | None = None
        inner: Any = None
        try:
            inner = self._optimizer_class(groups, **self._inner_defaults)
            if not isinstance(inner, torch.optim.Optimizer):
                raise TypeError(f"optimizer_class made a {type(inner).__name__}, not an optimizer.")
            if isinstance(inner, torch.optim.LBFGS):
                raise ValueError("a step of LBFGS cannot be sharded: use it as it is.")
        except Exception as error:
            refused = error
        said = [f"optimizer_class={type(inner).__name__}"]
        said += [f"{name}={_as_text(value)}" for name, value in self._inner_defaults.items()]
        if refused is not None:
            said = [f"optimizer_class=(refused: {type(refused).__name__})"]
        try:
            _core.verify_same_model([], [], said, name_of(self._replicas))
        except RuntimeError:
            if refused is None:
                raise
        if refused is not None:
            raise refused
        return inner  # type: ignore[no-any-return]

    def shard_master(self, parameter: Tensor, read: Callable[..., Tensor]) -> Tensor | None:
        """For apex.amp: a parameter's sharded master weight; None if every rank has all of it."""
        return ShardedMaster(parameter, read) if self._shards_masters else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are sharded separately. Collective."""
        super().add_param_group(param_group)
        if self._inner is None:  # called by torch's constructor
            return
        self._whole_state = None
        group = self.param_groups[-1]
        if (stash := getattr(self, "_amp_stash", None)) is not None:
            stash.collect()  # creates their master weights, which are stepped
        try:
            with self._moving():
                self._shares.add([group])
        except BaseException:
            del self.param_groups[-1]
            raise
        self._inner.add_param_group(
            {**settings_of(group), "params": self._shares.of(group["params"])}
        )
        _take_defaults(group, self._inner.param_groups[-1])

    def _follow_groups(self) -> None:
        """Shard replaced parameters again, if nothing has been stepped yet."""
        shares = self._shares
        held = shares.given
        given = [p for group in self.param_groups for p in group["params"]]
        if self._has_state:  # a parameter that was frozen gets its master weight later
            for i, (old, new) in enumerate(zip(held, given, strict=False)):
                if isinstance(new, ShardedMaster) and new.parameter is old:
                    shares.take_master(i, new, self.optim)
        same = len(held) == len(given) and all(a is b for a, b in zip(held, given, strict=True))
        kinds = [_kind_of(p) for p in self._shares.parameters]
        if same and (self._has_state or self._shares.kinds == kinds):
            return
        if self._has_state:
            raise RuntimeError(
                "the parameters in the groups of a ShardedOptimizer were replaced after its first "
                "step, so their state is lost: replace them before, or make a new optimizer."
            )
        if self.reduces_into_shards:
            raise RuntimeError(
                "the parameters of a ShardedOptimizer with reduce_scatter=True were replaced or "
                "converted: make the wrapper and the optimizer afterwards."
            )
        self._share_out()

    # --- steps ---

    @untraced
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Like ``torch.nn.utils.clip_grad_norm_`` of its parameters, also with ``reduce_scatter``.

        Each rank computes the norm of its share, so this costs less than torch's function.
        Collective. Blocks the host for gradients on the CPU.

        Args:
            max_norm, norm_type: as in torch's function.
            error_if_nonfinite: raise if the norm is not finite; the host waits for it.

        Returns:
            The norm before clipping, ``[]``, float32 or float64, the same on every rank.

        Raises:
            ValueError: for a sparse gradient, or ``norm_type`` <= 0.
            RuntimeError: with ``error_if_nonfinite``, if the norm is infinite or nan; if another
                rank has ended or failed; under ``join()``.
        """
        self._refuse_join()
        if not norm_type > 0:
            raise ValueError(f"norm_type is {norm_type}; it must be positive.")
        self._follow_groups()
        norm: Tensor = self._shares.total_norm(norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {norm.item()}, so they "
                "cannot be clipped: leave out error_if_nonfinite to clip nevertheless."
            )
        given = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grads_with_norm_(given, max_norm, norm)
        return norm

    #: torch's GradScaler then calls step() with `found_inf`, where it is refused.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        return self.reduces_into_shards

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """torch's wrapper of step(), which runs the hooks around `func`. If a pre-hook raises, the
        other ranks are notified."""
        hooked = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(hooked)
        def step(self: ShardedOptimizer, *args: Any, **kwargs: Any) -> Any:
            self._in_pre_hooks = True
            try:
                return hooked(self, *args, **kwargs)
            except BaseException as error:
                if self._in_pre_hooks:
                    self._give_up(error)
                raise

        return step

    def _refuse_join(self) -> None:
        if joining.current() is not None:
            raise RuntimeError(
                "a ShardedOptimizer needs every rank, and under join() some have run out of data: "
                "use the plain optimizer there."
            )

    def _give_up(self, error: BaseException) -> None:
        self._failed = True
        self._shares.core.give_up(f"{type(error).__name__}: {error}")

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's pieces and receive the others'. Collective.

        Blocks the host for parameters on the CPU; over NCCL, it is enqueued on the current stream.
        After an error on any rank, the process group can no longer be used, and the parameters have
        their values from before the step, or all have their values from after it (with one rank
        they may have been stepped). Ranks that share memory agree on this. Over NCCL, a later
        collective raises the error on the other ranks.

        Args:
            closure: evaluated first, once.

        Returns:
            The result of ``closure``.

        Raises:
            ValueError: for a sparse gradient, or a parameter whose dtype or device has changed.
            RuntimeError: if another rank has ended or failed, and under ``join()``.
        """
        self._in_pre_hooks = False
        self._refuse_join()
        if self.__dict__.pop("found_inf", None) is not None:
            self.__dict__.pop("grad_scale")
            raise RuntimeError(
                "GradScaler searches all gradients for infinities, and with reduce_scatter=True a "
                "rank has only its share: train in bfloat16, which needs no loss scaling, or leave "
                "out reduce_scatter."
            )
        result = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            self._whole_state = None
            self._follow_groups()
            inner = self.optim
            for group, of_inner in zip(self.param_groups, inner.param_groups, strict=True):
                of_inner.update(settings_of(group))
            self._has_state = True
            self._shares.step(inner)
        except BaseException as error:
            self._give_up(error)
            raise
        self._failed = True
        self._shares.core.publish()
        self._failed = False
        for group, of_inner in zip(self.param_groups, inner.param_groups, strict=True):
            changed = {k: v for k, v in settings_of(of_inner).items() if v is not group.get(k)}
            self._counted.update(changed)
            group.update(changed)
        return result

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ShardedOptimizer is one of several ranks, and cannot be copied or pickled: use "
            "state_dict()."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"
