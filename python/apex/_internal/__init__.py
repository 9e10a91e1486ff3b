# SPDX-License-Identifier: BSD-3-Clause
"""What ``apex.amp``, ``apex.fp16_utils`` and ``apex.parallel`` share; it imports none of them."""
