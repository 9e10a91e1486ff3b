# SPDX-License-Identifier: BSD-3-Clause
"""The functions that level O1 runs in each dtype.

As in Apex, ``torch_overrides``, ``functional_overrides`` and ``tensor_overrides`` hold lists of
names in one namespace each: ``FP16_FUNCS``, ``FP32_FUNCS``, ``CASTS``, ``SEQUENCE_CASTS`` and
``BANNED_FUNCS``. Scripts may change them before :func:`apex.amp.initialize`. Other functions run in
the dtype of their inputs, by torch's own rules.
"""

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
