# A test that this machine cannot run: says why. CTest counts it as skipped by these words.
message("SKIPPED: ${REASON}")
