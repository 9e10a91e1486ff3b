// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Defines APEX_HOST_STEP for library sources that are included after this header.

#include <functional>

namespace apex::testing {
/// Called at every step of the protocol in this process.
inline std::function<void(const char*)> at_step;
}  // namespace apex::testing

#define APEX_HOST_STEP(name)                                      \
  do {                                                            \
    if (::apex::testing::at_step) ::apex::testing::at_step(name); \
  } while (false)
