# SPDX-License-Identifier: BSD-3-Clause
"""Holds the names of ``apex.contrib`` that old scripts import beside :mod:`apex.amp`."""
