// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

namespace apex::testing {

/// Every run has the same values. APEX_TEST_SEED chooses others.
inline uint64_t fresh_seed() {
  const char* given = std::getenv("APEX_TEST_SEED");
  return given != nullptr ? std::stoull(given) : 1;
}

}  // namespace apex::testing
