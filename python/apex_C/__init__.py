# SPDX-License-Identifier: BSD-3-Clause
"""The functions of Apex's extension module ``apex_C``: flat copies of lists of tensors."""

from apex._internal.flat import flatten, unflatten

__all__ = ["flatten", "unflatten"]
