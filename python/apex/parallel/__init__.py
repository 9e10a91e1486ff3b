# SPDX-License-Identifier: BSD-3-Clause
"""Data-parallel training: gradients are averaged over processes while backward is still running.

As in NVIDIA's Apex, ``LARC`` and ``multiproc`` are modules: ``from apex.parallel.LARC import LARC``
or ``apex.parallel.LARC.LARC``, and ``python -m apex.parallel.multiproc script.py``.
"""

from torch.distributed import ReduceOp

from apex.parallel import LARC
from apex.parallel._stalls import stall_report
from apex.parallel.distributed import DistributedDataParallel, Reducer, flat_dist_call
from apex.parallel.sync_batchnorm import SyncBatchNorm
from apex.parallel.syncbn_convert import (
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "DistributedDataParallel",
    "LARC",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
    "flat_dist_call",
    "stall_report",
]
