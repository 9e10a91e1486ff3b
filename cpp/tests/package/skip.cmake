# SPDX-License-Identifier: BSD-3-Clause
# A test that this machine cannot run: says why. CTest counts it as skipped by these words.
message("SKIPPED: ${REASON}")
