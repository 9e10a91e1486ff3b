# SPDX-License-Identifier: BSD-3-Clause
"""Data-parallel and mixed-precision training for PyTorch.

``apex.parallel``, ``apex.amp`` and ``apex.fp16_utils`` have the interfaces of NVIDIA's Apex. The
engine is written in C++ (``apex._core``).
"""

from apex import _check

_check.installation()

from apex import _core  # noqa: E402  (after the check: its error is clearer than a linker's)
from apex._check import DeprecatedFeatureWarning  # noqa: E402

__version__ = _core.__version__

import sys  # noqa: E402

import torch  # noqa: E402

from apex._internal import not_served  # noqa: E402

sys.meta_path.append(not_served.Finder)

from apex import amp, fp16_utils, multi_tensor_apply, normalization, optimizers  # noqa: E402

if torch.distributed.is_available():
    from apex import _host_backend, parallel  # noqa: E402

    _host_backend.register()

__all__ = [
    "DeprecatedFeatureWarning",
    "__version__",
    "amp",
    "fp16_utils",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
]
