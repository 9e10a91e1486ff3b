# SPDX-License-Identifier: BSD-3-Clause
"""The float32 master weights of one optimizer's low-precision parameters."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .._internal.dtypes import is_low_precision
from ._amp_state import several_ranks
from ._full_values import FullValue, full_value, record_of

#: The key in the optimizer's state under which master weights are saved by parameter index.
MASTER_WEIGHTS = "amp_master_weights"


class MasterWeights:
    """Replaces each trained low-precision parameter in ``param_groups`` by a float32 master.

    This applies only with master weights. Optimizers that hold the same parameter share its master.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, master_weights: bool) -> None:
        self._optimizer = optimizer
        self.master_weights = master_weights
        self.lazy_init_called = False
        #: Low-precision parameters of the model, and their masters, in the same order.
        self.all_fp16_params: list[torch.Tensor] = []
        self.all_fp32_from_fp16_params: list[torch.Tensor] = []
        #: Every other parameter that requires a gradient.
        self.all_fp32_from_fp32_params: list[torch.Tensor] = []
        #: True between the end of a context and the next step or zero_grad.
        self._in_iteration = False
        #: By the id of the master: the master, its parameter, and the record of both.
        self._model_of: dict[int, tuple[torch.Tensor, torch.Tensor, FullValue]] = {}

    @property
    def all_fp32_params(self) -> list[torch.Tensor]:
        """The parameters without a master."""
        return self.all_fp32_from_fp32_params

    def lazy_init(self) -> None:
        """Create the masters on the first call."""
        if not self.lazy_init_called:
            self.lazy_init_called = True
            self.collect()

    def collect(self) -> None:
        """Read ``param_groups`` again, and create masters for new low-precision parameters."""
        self.all_fp16_params, self.all_fp32_from_fp16_params = [], []
        self.all_fp32_from_fp32_params = []
        for group in self._optimizer.param_groups:
            params = group["params"]
            for index, param in enumerate(params):
                if not param.requires_grad:
                    continue
                if id(param) not in self._model_of and self.master_weights:
                    if is_low_precision(param):
                        params[index] = param = self._make_master(param)
                known = self._model_of.get(id(param))
                if known is None:
                    self.all_fp32_from_fp32_params.append(param)
                else:
                    self.all_fp16_params.append(known[1])
                    self.all_fp32_from_fp16_params.append(known[0])

    def _make_master(self, param: torch.Tensor) -> torch.Tensor:
        sharded = sys.modules.get("torch.distributed.tensor")
        if sharded is not None and isinstance(param, sharded.DTensor):
            raise RuntimeError(
                f"{type(self._optimizer).__name__} holds a {param.dtype} parameter that is a "
                "DTensor (fully_shard, or tensor parallel), for which amp cannot keep a master "
                "weight: use level O1."
            )
        record = record_of(param)
        master = record.master
        if master is None or (master.shape, master.device) != (param.shape, param.device):
            master = record.master = torch.nn.Parameter(record.read(param), requires_grad=True)
            record.remembered = None
            record.stepped = record.settled = False
            record.known_to_all = several_ranks()
            record.note_agreement(param)
        # it belongs to another or an earlier optimizer: later writes to the parameter take effect
        else:
            record.settled = False
        self._model_of[id(master)] = (master, param, record)
        state = self._optimizer.state
        if param in state:
            state[master] = {
                key: value.float() if torch.is_tensor(value) and is_low_precision(value) else value
                for key, value in state.pop(param).items()
            }
        return master

    @torch.no_grad()
    def follow_model(self) -> None:
        """Copy the model's values into masters that were created or loaded and not stepped since.

        A master whose rounding equals the model's value stays: Note [One value, two precisions]. So
        does a master that other code has written. Between scale_loss and step(), a master may be
        decayed or clamped without a version change, so only parameters with a detected change are
        considered.
        """
        for master, param, record in self._model_of.values():
            if record.settled or record.master_changed():
                continue
            if record.parameter_changed(param) or not self._in_iteration:
                master.copy_(record.read(param))
                record.remembered = None
                record.note_agreement(param)

    def refuse_changed_masters(self) -> None:
        if any(record.master_changed() for _, _, record in self._model_of.values()):
            raise RuntimeError(
                f"{this_rank()}the master weights of {type(self._optimizer).__name__} were changed "
                "outside its step(), and the loss given to amp.scale_loss was computed from the "
                "old values: after such a change, call optimizer._master_params_to_model_params() "
                "before forward."
            )

    def _by_index(self) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        """Low-precision parameters and their masters, by the index in the optimizer's state.

        A frozen parameter may have no master.
        """
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        masters = {key: (param, master) for key, (master, param, _) in self._model_of.items()}
        known = {index: masters.get(id(param), (param, None)) for index, param in enumerate(params)}
        return {index: pair for index, pair in known.items() if is_low_precision(pair[0])}

    def save_masters(self, state: dict[str, Any]) -> None:
        """Add the masters to the optimizer's `state`: Note [Values that only one rank has]."""
        if self._model_of and several_ranks():
            self.follow_model()
            state[MASTER_WEIGHTS] = {
                index: full_value(param) if master is None else master.detach()
                for index, (param, master) in self._by_index().items()
                if master is not None or record_of(param).restored is not None
            }

    def load_masters(self, state: dict[str, Any]) -> None:
        """Read the masters from the optimizer's `state`, if it contains any."""
        # If masters did not exist yet, the loaded state would be rounded to the parameters' dtype.
        self.lazy_init_called = True
        self.collect()
        saved = state.get(MASTER_WEIGHTS, {})
        for index, (param, _) in self._by_index().items():
            if index in saved:
                record = record_of(param)
                # Whether the values match the parameters is unknown: these may be loaded after
                # this.
                record.restored = saved[index].detach()
                record.note_load()

    def masters_to_model(self) -> None:
        """Round every master into its parameter. From now on the masters are authoritative.

        One multi-tensor copy. Also for code that changes master weights directly.
        """
        if self.all_fp16_params:
            with torch.no_grad():
                torch._foreach_copy_(self.all_fp16_params, self.all_fp32_from_fp16_params)
        for _, param, record in self._model_of.values():
            record.restored = None
            record.stepped = record.settled = True
            record.note_agreement(param)
        self._in_iteration = False


def this_rank() -> str:
    """The prefix of error messages."""
    return f"rank {torch.distributed.get_rank()}: " if several_ranks() else ""
