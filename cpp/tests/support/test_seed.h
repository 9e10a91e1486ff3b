// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

namespace apex::testing {

/// A new seed per run; APEX_TEST_SEED sets it.
inline uint64_t fresh_seed() {
  const char* given = std::getenv("APEX_TEST_SEED");
  return given != nullptr ? std::stoull(given) : std::random_device{}();
}

}  // namespace apex::testing
