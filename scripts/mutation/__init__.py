# SPDX-License-Identifier: BSD-3-Clause
"""What scripts/mutate.py is made of."""
