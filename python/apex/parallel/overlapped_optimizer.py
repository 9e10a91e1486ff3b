# SPDX-License-Identifier: BSD-3-Clause
"""OverlappedOptimizer: hides the end of a step's communication under the next step's forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from apex._internal import pending
from apex._internal.optimizer_steps import taking_parts
from apex._internal.untraced import untraced
from apex._internal.wrapped_optimizer import WrappedOptimizer
from apex.parallel._hooks import ReducedBucket
from apex.parallel.distributed import DistributedDataParallel

# Note [Steps that are taken later]
#
# backward() returns while buckets are in flight, and step() then updates the parameters whose
# gradients are complete. The next forward updates the others: before each module, it waits for the
# buckets of the module's own parameters, and the engine calls _bucket_arrived() for each. By then,
# a scheduler may have changed the learning rate, and zero_grad() may have been called for the next
# step. So step() saves the settings of all groups, and each later update uses them. A zero_grad()
# in between clears a gradient only after its update.


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _counter_of(optimizer: Any) -> str | None:
    """The group entry in which `optimizer`, or an optimizer inside it, counts its steps."""
    counters = (getattr(inner, "_counter", None) for inner in _nested(optimizer))
    return next((counter for counter in counters if counter is not None), None)


def _nested(optimizer: Any) -> Iterator[Any]:
    """`optimizer`, and the optimizers that it wraps."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optim", None)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return left is right or bool(left == right)


class _LaterSteps:
    """The parameters that a step() has not updated yet, and the settings for their update."""

    def __init__(self, parameters: set[nn.Parameter], groups: list[dict[str, Any]]) -> None:
        self.parameters = parameters
        self.settings = [{k: _copy(v) for k, v in _settings(group).items()} for group in groups]
        self.clear: bool | None = None  # the set_to_none of a zero_grad() call; None: not called


class _Hook:
    """A hook before a module's forward. Copies and pickles of the module drop the optimizer."""

    def __init__(self, optimizer: OverlappedOptimizer | None = None) -> None:
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None:
            self._run(optimizer, module)

    def _run(self, optimizer: OverlappedOptimizer, module: nn.Module) -> None:
        optimizer._before_forward(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class _StateHook(_Hook):
    """A hook before a module's state_dict()."""

    def _run(self, optimizer: OverlappedOptimizer, module: nn.Module) -> None:
        optimizer.synchronize()


class OverlappedOptimizer(WrappedOptimizer):
    """Overlaps the last buckets of a backward with the next forward.

    In the next forward, each module waits only for the gradients of its own parameters, which are
    updated then. Buckets are launched in the order in which forward needs them. Results are bitwise
    the same as without it. (With three or more processes this requires the same bucket plan, which
    determines the order of summation.) Use it where the network is the bottleneck, with buckets of
    one to a few MiB, so that the first layers do not wait for all others::

        model = DistributedDataParallel(model, bucket_cap_mb=2)
        optimizer = OverlappedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for x, y in loader:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()
        optimizer.synchronize()

    Between backward and the next forward, gradients and parameters are not final. Call
    :meth:`synchronize` before reading or changing them: for gradient clipping,
    ``GradScaler.unscale_``, norms, averaging of weights, and after the last step. ``state_dict()``
    of the model and of this object, ``GradScaler.step``, ``apex.amp.scale_loss`` and the recording
    of a new bucket plan synchronize automatically. Clear gradients by this object's
    ``zero_grad()``.

    Source: Peng et al., "A Generic Communication Scheduler for Distributed DNN Training
    Acceleration" (ByteScheduler), SOSP 2019. The order is fixed here, because all processes must
    launch buckets in the same order.

    Args:
        optimizer: any optimizer that updates each parameter independently and keeps no state in
            its groups. Its step hooks run once for each part of a step.
        model: the wrapper of the module whose parameters it updates. The optimizer may also hold
            other parameters, which :meth:`step` updates immediately.

    Raises:
        TypeError: for other objects.
        ValueError: if ``model`` already has an OverlappedOptimizer, or for
            an optimizer that is known not to update parameters one by one.

    In every step, a parameter must be used in the forward of the module that owns it, or of the
    same ancestor of that module. Compiled modules are waited for as a whole. If a parameter was
    used elsewhere before its update, backward raises RuntimeError: ours, or torch's about a
    variable modified by an inplace operation. Backward waits for all buckets if it records or
    orders a plan, if this process misses a gradient, with ``check_finite`` and
    ``check_reduction=True``, under ``join()``, and with communication hooks of two phases.
    Construct it on every process. Not thread safe.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"expected an optimizer, got {type(optimizer).__name__}.")
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"expected an apex.parallel.DistributedDataParallel, got {type(model).__name__}."
            )
        kinds = {kind.__name__ for inner in _nested(optimizer) for kind in type(inner).__mro__}
        names = (
            "ZeroRedundancyOptimizer",
            "ShardedOptimizer",
            "LBFGS",
            "FusedLAMB",
            "FusedNovoGrad",
        )
        for name in names:
            if name in kinds:
                raise ValueError(
                    f"{name} cannot step its parameters one module at a time: use it without "
                    "OverlappedOptimizer."
                )
        engine = model._engine
        if engine.hooks.optimizer is not None:
            raise ValueError(
                "this model already has an OverlappedOptimizer, and can have only one."
            )
        super().__init__(optimizer)
        self._model = model  # keeps the engine connected
        self._engine = engine
        self._later: _LaterSteps | None = None
        engine.hooks.set_optimizer(engine.connected(), self)
        self._called: set[nn.Module] = set()
        # by the number of the engine's reducer
        self._waits: tuple[int, dict[nn.Module, list[int]]] = (0, {})
        self._hook_modules(model.module)
        pending.holders.add(self)

    # --- waiting, module by module ---

    # Some modules use the parameters of a child without calling it, for example
    # nn.MultiheadAttention. Before anything is in flight, called modules are recorded. The
    # parameters of other modules are waited for by their nearest ancestor that is called.

    def _hook_modules(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(_Hook(self), prepend=True)
        module.register_state_dict_pre_hook(_StateHook(self))
        if not hasattr(module, "_orig_mod"):  # compiled modules are waited for as a whole
            for child in module.children():
                self._hook_modules(child)

    def _before_forward(self, module: nn.Module) -> None:
        if self._waits[0] != self._engine.made and not self._assigned(module):
            return
        if parameters := self._waits[1].get(module):
            self._wait_for(parameters)

    @untraced
    def _wait_for(self, parameters: list[int]) -> None:
        self._engine.connected().wait_for(parameters)

    @untraced
    def _assigned(self, module: nn.Module) -> bool:
        """Assign the waits, once buckets are in flight. Before, record the call of `module`."""
        if not self._engine.connected().in_flight():
            self._called.add(module)
            return False
        self._waits = (self._engine.made, self._assign())
        return True

    def _assign(self) -> dict[nn.Module, list[int]]:
        """For each module, the indices of the parameters that its forward waits for."""
        index = {p: i for i, p in enumerate(self._engine.parameters)}
        waits: dict[nn.Module, list[int]] = {}

        def visit(module: nn.Module, above: nn.Module) -> None:
            caller = module if module in self._called else above
            own = [index[p] for p in module.parameters(recurse=False) if p in index]
            for waiting in {module, caller}:
                waits.setdefault(waiting, []).extend(own)
            for child in module.children():
                visit(child, caller)

        visit(self._model.module, self._model.module)
        return waits

    def synchronize(self) -> None:
        """Blocks until all gradients are complete and all requested updates are made.

        On CPU backends the host waits, on NCCL the current stream.
        """
        self._engine.connected().wait()

    def _in_flight(self) -> set[nn.Parameter]:
        seen = self._engine.parameters
        return {seen[i] for i in self._engine.connected().in_flight()}

    def _bucket_arrived(self, bucket: ReducedBucket) -> None:
        later = self._later
        if later is None:
            return
        due = [p for p in bucket.parameters if p in later.parameters]
        for parameter in due:
            if parameter.grad is None:
                name = next(n for n, p in self._model.module.named_parameters() if p is parameter)
                raise RuntimeError(
                    f"the gradient of parameter '{name}' was cleared while its all-reduce was in "
                    "flight, so its update is lost: clear gradients with "
                    "OverlappedOptimizer.zero_grad()."
                )
        later.parameters.difference_update(due)
        self._update(set(due), later.settings)
        if later.clear is not None:
            _clear(due, later.clear)
        if not later.parameters:
            self._later = None

    # --- the optimizer ---

    @torch.no_grad()
    def _update(self, parameters: set[nn.Parameter], settings: list[dict[str, Any]] | None) -> None:
        """Updates only these parameters, with these settings of the groups (None: the current
        ones)."""
        groups = self.optim.param_groups
        present = [dict(group) for group in groups]
        used = present if settings is None else settings
        counter = _counter_of(self.optim)
        inner = list(_nested(self.optim))
        taking_parts.update(inner)
        try:
            for group, values in zip(groups, used, strict=True):
                group.update(_settings(values))
                group["params"] = [p for p in group["params"] if p in parameters]
            self.optim.step()
            for group, values in zip(groups, used, strict=True):
                kept = {k: v for k, v in _settings(values).items() if k != counter}
                changed = [k for k, v in kept.items() if not _same(group[k], v)]
                if changed:
                    raise RuntimeError(
                        f"{type(self.optim).__name__}.step() changes '{changed[0]}' of its "
                        "parameter groups, so it cannot step its parameters one module at a time: "
                        "use it without OverlappedOptimizer."
                    )
                if settings is None and counter in group:  # the first part of a step counts for all
                    values[counter] = group[counter]
        finally:
            taking_parts.difference_update(inner)
            for group, values in zip(groups, present, strict=True):
                group.update(values)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters whose gradients are complete, and schedules the update of the
        others.

        Args:
            closure: evaluated first, once.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self._later is not None:
            self.synchronize()
        waiting = self._in_flight()
        everything = {p for group in self.optim.param_groups for p in group["params"]}
        waiting &= everything
        if not waiting:
            self.optim.step()
            return result
        self._later = _LaterSteps(waiting, self.optim.param_groups)
        self._update(everything - waiting, None)
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients. Gradients that an update still needs are cleared after it."""
        if set_to_none is None:
            set_to_none = all(getattr(o, "set_grad_none", True) for o in _nested(self.optim))
        waiting, later = self._in_flight(), self._later
        if waiting and later is None:  # without a step(), no update needs them
            self.synchronize()
            waiting = set()
        if not waiting or later is None:
            # The optimizer's own method, because mixed precision keeps gradients outside of the
            # groups.
            self.optim.zero_grad(set_to_none)
            return
        everything = [p for group in self.optim.param_groups for p in group["params"]]
        _clear([p for p in everything if p not in waiting], set_to_none)
        later.clear = set_to_none

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch's GradScaler reads this before it reads gradients in its step().
        self.synchronize()
        return False

    # --- methods of the wrapped optimizer ---

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict, after :meth:`synchronize`."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the wrapped optimizer's state dict, after :meth:`synchronize`."""
        self.synchronize()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer, after :meth:`synchronize`."""
        self.synchronize()
        self.optim.add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an OverlappedOptimizer cannot be copied or pickled, because it is connected to its "
            "model: save its state_dict(), or its 'optim' after synchronize()."
        )


def _clear(parameters: list[nn.Parameter], set_to_none: bool) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if set_to_none:
            parameter.grad = None
        else:
            parameter.grad.detach_().zero_()
