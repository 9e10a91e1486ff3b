# SPDX-License-Identifier: BSD-3-Clause
"""The parts of ``python -m apex.doctor``: facts, measurements, and rules that evaluate them."""
