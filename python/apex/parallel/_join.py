# SPDX-License-Identifier: BSD-3-Clause
"""Uneven inputs: the context manager of ``DistributedDataParallel.join()``.

The reducer takes part in the backwards of the other ranks; see Note [Uneven inputs] in C++.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from apex._internal import joining, not_served
from apex.parallel._engine import Engine
from apex.parallel.sync_batchnorm import SyncBatchNorm


class Join:
    """The context manager of one ``with ddp.join():``. Can be used once."""

    def __init__(
        self,
        engine: Engine,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
    ) -> None:
        self._reducer = engine.connected()
        self._engine = engine
        self._options = divide_by_initial_world_size, throw_on_early_termination

    def __enter__(self) -> Join:
        if joining.active():
            raise RuntimeError(
                "join() was entered inside another join(): wrap modules that are trained together "
                "in one DistributedDataParallel, or train them in separate loops."
            )
        module = self._engine.module
        if any(isinstance(one, (SyncBatchNorm, nn.SyncBatchNorm)) for one in module.modules()):
            not_served.refuse("DistributedDataParallel.join() with SyncBatchNorm", RuntimeError)
        self._reducer.begin_join(*self._options)
        joining.set_active(True)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        joining.set_active(False)
        if kind is not None:
            self._reducer.leave_join()
            return
        tensors = [tensor for _, tensor in self._engine.named_tensors()]
        # C++'s join() passes the same list. Its ranks may be in this job.
        self._reducer.end_join([one for one in tensors if one.layout == torch.strided])
