# SPDX-License-Identifier: BSD-3-Clause
"""What other packages need in order to use apex.parallel; each module needs its package."""
