# SPDX-License-Identifier: BSD-3-Clause
# Prints why this machine cannot run a test. CTest recognizes a skipped test by this text.
message("SKIPPED: ${REASON}")
