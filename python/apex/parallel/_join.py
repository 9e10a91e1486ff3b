"""Uneven inputs: what ``DistributedDataParallel.join()`` does.

A rank that has run out of batches takes part in what the others still do, with zeros. How it learns
what that is: Note [Uneven inputs] in cpp/src/reducer/join_protocol.h.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from apex import _core
from apex._core import JoinEventKind as Kind
from apex._group_names import name_of
from apex.parallel._groups import world_group

_current: Join | None = None


def current() -> Join | None:
    """The join() in force in this process, for modules with collectives of their own."""
    return _current


def set_current(join: Join | None) -> None:
    global _current
    _current = join


class Join:
    """One ``with ddp.join():``; a context manager, used once."""

    def __init__(
        self,
        ddp: Any,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
        scalers: Sequence[Any],
    ) -> None:
        self._ddp = ddp
        self._divide_by_initial_world_size = divide_by_initial_world_size
        self._throws = throw_on_early_termination
        self._scalers = list(scalers)
        self._world = dist.get_world_size(ddp.process_group)
        # Outputs of batch norms that this rank ran in the others' stead, until the next forward
        # after their backward.
        self._outputs: list[torch.Tensor] = []
        self._went_backward = False
        self._has_data = True

    def __enter__(self) -> Join:
        if current() is not None or self._ddp._join is not None:
            raise RuntimeError(
                "join() inside join(): wrap the modules that are trained together in one "
                "DistributedDataParallel, or train them in separate loops."
            )
        self._ddp._engine.begin_join(self._divide_by_initial_world_size)
        self._ddp._join = self
        set_current(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._shadow_others()
        finally:
            self._end()

    def _end(self) -> None:
        self._ddp._engine.end_join()
        self._ddp._join = None
        set_current(None)
        self._outputs = []

    # --- while this rank has data ---

    def announce_forward(self, synchronizes_buffers: bool) -> int:
        """Returns the rank whose buffers are taken."""
        event = self._ddp._engine.announce(Kind.FORWARD, int(synchronizes_buffers))
        self._check(event[2])
        root: int = event[2][0]
        return root

    def announce_batch_norm(self, module: Any, goes_backward: bool) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "SyncBatchNorm runs within backward (activation checkpointing) under join(): the "
                "ranks "
                "without data cannot follow it. Leave it out of checkpointed segments, or give "
                "every rank equally many batches."
            )
        if module.process_group is not None:
            raise RuntimeError(
                "SyncBatchNorm with a process_group of its own under join(): ranks without data "
                "follow those that use the default communicator only."
            )
        self._ddp._engine.announce(Kind.CUSTOM, 2 * module.num_features + int(goes_backward))

    def announce_overflow_flags(self, scaler: Any, group: dist.ProcessGroup | None) -> None:
        """A loss scaler is about to combine its overflow flags over `group`."""
        if not self._has_data:
            return
        known = [index for index, one in enumerate(self._all_scalers()) if one is scaler]
        ranks = dist.get_process_group_ranks(self._ddp.process_group)
        if not known or dist.get_process_group_ranks(group) != ranks:
            raise RuntimeError(
                "a dynamic loss scaler that combines its overflow flags under join() has to be one "
                "of amp.initialize() or of join(scalers=[...]), over the ranks of the wrapper's "
                "process group: the ranks without data follow no other."
            )
        self._ddp._engine.announce(Kind.CUSTOM, -1 - known[0])

    def _all_scalers(self) -> list[Any]:
        return [*self._scalers, *_amp_scalers()]

    def _check(self, active: list[int]) -> None:
        if self._throws and len(active) < self._world:
            ended = sorted(set(range(self._world)) - set(active))
            raise RuntimeError(
                f"rank {dist.get_rank(self._ddp.process_group)}: ranks {ended} have run out of "
                "data, and join(throw_on_early_termination=True) asked to be told. (Detected at "
                "least one rank that exhausted inputs.)"
            )

    # --- when it has none ---

    def _shadow_others(self) -> None:
        shadowed = self._has_data = False
        while True:
            event = self._ddp._engine.await_event()
            if event[0] == Kind.END:
                break
            shadowed = True
            self._follow(*event)
        self._take_final_state(shadowed)

    def _follow(self, kind: Kind, argument: int, active: list[int]) -> None:
        self._check(active)
        engine = self._ddp._engine
        if kind == Kind.FORWARD:
            self._shadow_forward(bool(argument), active[0])
        elif kind == Kind.CUSTOM and argument < 0:  # the overflow flags of a loss scaler
            scaler = self._all_scalers()[-1 - argument]
            scaler.synchronize(scaler.overflow_group)
            scaler.clear_overflow_state()  # as if it had never seen them: it will get a state
        elif kind == Kind.CUSTOM:  # a batch norm
            self._outputs.append(_shadow_batch_norm(argument // 2, bool(argument % 2)))
        elif kind == Kind.BACKWARD:
            engine.shadow_backward_begin(bool(argument))
            self._shadow_backward()
            engine.shadow_backward_end()
        else:
            self._shadow_backward()

    def _shadow_forward(self, synchronizes_buffers: bool, root: int) -> None:
        if self._went_backward:
            self._outputs = []
            self._went_backward = False
        self._ddp._engine.prepare_for_forward()
        if synchronizes_buffers:
            self._ddp._sync_buffers(root)

    def _shadow_backward(self) -> None:
        self._went_backward = True
        roots = [output.sum() for output in self._outputs if output.requires_grad]
        if roots:
            # As on the other ranks, the batch norm of the last forward goes first.
            torch.autograd.backward(roots, retain_graph=True)

    def _take_final_state(self, shadowed: bool) -> None:
        """Parameters, buffers and scalers of a rank that trained to the end, for those that did
        not."""
        ddp = self._ddp
        group = ddp.process_group
        scalers = self._all_scalers()
        root = ddp._engine.last_with_data(shadowed, len(scalers))
        if root < 0:
            return
        device = collective_device(group)
        ignored = ddp.parameters_to_ignore
        tensors = [t for n, t in ddp.module.named_parameters() if n not in ignored]
        tensors += [t for n, t in ddp.module.named_buffers() if n not in ignored]
        what = "broadcast of parameters and buffers at the end of join()"
        _core.broadcast_coalesced([t.detach() for t in tensors], name_of(group), root, what)
        _take_full_values(ddp.module, group, root, device, shadowed)
        if scalers:
            states = _broadcast_object(
                [scaler.state_dict() for scaler in scalers],
                *(group, root, device, "broadcast of loss scalers at the end of join()"),
            )
            if shadowed:
                for scaler, state in zip(scalers, states, strict=True):
                    scaler.load_state_dict(state)
        # Nobody goes on, and perhaps ends, before all have what was sent.
        nothing = [torch.zeros(1, device=device)]
        _core.all_reduce_coalesced(nothing, name_of(group), 1.0, "end of join()")


def _take_full_values(
    module: torch.nn.Module,
    group: dist.ProcessGroup,
    root: int,
    device: torch.device,
    takes: bool,
) -> None:
    """What rank ``root`` knows of its low-precision parameters in float32, its master weights."""
    amp = sys.modules.get("apex.amp._full_values")
    known = amp is not None and amp.has_full_values(module)
    what = "broadcast of master weights at the end of join()"
    if not _broadcast_object(known, group, root, device, what):
        return
    from apex.amp._full_values import full_value, set_full_value
    from apex.amp.casts import is_low_precision

    parameters = [parameter for parameter in module.parameters() if is_low_precision(parameter)]
    values = [full_value(parameter) for parameter in parameters]
    _core.broadcast_coalesced(values, name_of(group), root, what)
    if takes:
        for parameter, value in zip(parameters, values, strict=True):
            set_full_value(parameter, value)


def _broadcast_object(
    value: Any, group: dist.ProcessGroup, root: int, device: torch.device, what: str
) -> Any:
    """What rank ``root`` passes as ``value``; anything that can be pickled."""
    sent = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    size = torch.tensor([sent.numel()], device=device)
    _core.broadcast_coalesced([size], name_of(group), root, what)
    if sent.numel() != int(size):
        sent = torch.empty(int(size), dtype=torch.uint8, device=device)
    _core.broadcast_coalesced([sent], name_of(group), root, what)
    return pickle.loads(sent.cpu().numpy().tobytes())


def _shadow_batch_norm(channels: int, goes_backward: bool) -> torch.Tensor:
    """Takes part in one SyncBatchNorm with an empty batch, whose count of values is zero."""
    from apex.parallel.syncbn_group import default_group_name

    device = collective_device(world_group())
    empty = torch.empty(0, channels, device=device, requires_grad=goes_backward)
    output: torch.Tensor = torch.ops.apex.sync_batch_norm(
        empty, None, None, None, None, None, None, 0.1, 1e-5, False, False, default_group_name()
    )[0]
    return output


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors have to be for a collective of ``group``."""
    if "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _amp_scalers() -> list[Any]:
    """The loss scalers of apex.amp, if the script uses it."""
    amp = sys.modules.get("apex.amp")
    return list(getattr(amp._amp_state, "loss_scalers", ())) if amp is not None else []
