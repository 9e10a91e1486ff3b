# SPDX-License-Identifier: BSD-3-Clause
"""Uneven inputs: ``DistributedDataParallel.join()``, and the wrapper in torch's ``Join``."""

from apex.parallel._join.join import Join
from apex.parallel._join.torch_join import TorchJoin, TorchJoinHook

__all__ = ["Join", "TorchJoin", "TorchJoinHook"]
