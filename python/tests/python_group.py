# SPDX-License-Identifier: BSD-3-Clause
"""A process group written in Python. It has no backends, and all of its users share it."""

from __future__ import annotations

import collections
import datetime
from typing import Any

import torch
import torch.distributed as dist


class PythonWork(dist._Work):
    """A collective with a Python method that waits for its end."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self.work = work

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        return self.work.wait()


class Delegate(dist.ProcessGroup):
    """Without a name, as torchft's groups. Calls are counted and forwarded to ``inner``."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.calls: collections.Counter[str] = collections.Counter()

    def getBackendName(self) -> str:  # noqa: N802
        return "delegate"

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        self.calls["allreduce"] += 1
        return PythonWork(self.inner.allreduce(tensors, options))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        self.calls["broadcast"] += 1
        return PythonWork(self.inner.broadcast(tensors, options))

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any
    ) -> dist.Work:
        self.calls["allgather"] += 1
        return self.inner.allgather(outputs, inputs, options)

    def barrier(self, options: Any) -> dist.Work:
        return self.inner.barrier(options)
