# SPDX-License-Identifier: BSD-3-Clause
"""The parts of ``python -m apex.parallel.multiproc``."""
