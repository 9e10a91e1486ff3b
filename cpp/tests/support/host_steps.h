// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Defines APEX_HOST_STEP for library sources that are included after this header.

#include <cstdlib>
#include <functional>
#include <string>

namespace apex::testing {
/// Called at every step of the protocol in this process.
inline std::function<void(const char*)> at_step;

/// Tests every fourth step, `salt` says which of the four. APEX_TEST_EVERY_STEP=1 tests all steps,
/// which takes minutes.
inline bool is_tried(int step, int salt) {
  const char* const every = std::getenv("APEX_TEST_EVERY_STEP");
  return (every != nullptr && std::string(every) == "1") || (step + salt) % 4 == 0;
}
}  // namespace apex::testing

#define APEX_HOST_STEP(name)                                      \
  do {                                                            \
    if (::apex::testing::at_step) ::apex::testing::at_step(name); \
  } while (false)
