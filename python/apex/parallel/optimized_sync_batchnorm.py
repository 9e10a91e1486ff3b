# SPDX-License-Identifier: BSD-3-Clause
"""Apex's module of the kernels' SyncBatchNorm; there is one implementation here."""

from apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
