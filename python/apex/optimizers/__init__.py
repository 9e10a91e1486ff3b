# SPDX-License-Identifier: BSD-3-Clause
"""Apex's fused optimizers.

FusedAdam and FusedSGD are torch's own fused optimizers. FusedLAMB, FusedNovoGrad and FusedAdagrad
use torch's foreach operators. ShardedOptimizer distributes the work of any of them among ranks.
"""

from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_novograd import FusedNovoGrad
from .fused_sgd import FusedSGD
from .sharded_optimizer import ShardedOptimizer

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedNovoGrad",
    "FusedSGD",
    "ShardedOptimizer",
]
