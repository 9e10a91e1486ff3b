# SPDX-License-Identifier: BSD-3-Clause
"""The names of ``apex.contrib`` that old scripts import together with :mod:`apex.amp`."""
