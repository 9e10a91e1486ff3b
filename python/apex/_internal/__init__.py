# SPDX-License-Identifier: BSD-3-Clause
"""Code shared by ``apex.amp``, ``apex.fp16_utils`` and ``apex.parallel``. Imports none of them."""
