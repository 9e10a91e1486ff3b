# SPDX-License-Identifier: BSD-3-Clause
"""Apex's module for its CUDA SyncBatchNorm. This package has one implementation for all."""

from apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
