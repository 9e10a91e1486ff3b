# SPDX-License-Identifier: BSD-3-Clause
"""Integrations of apex.parallel with other packages. Each module needs its package."""
