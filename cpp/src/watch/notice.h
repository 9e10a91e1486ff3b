// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

namespace apex::parallel {

/// Writes "apex: TEXT" to stderr and passes TEXT to the callback of on_notice(). Thread safe;
/// blocks only as long as the callback does.
void notify(const std::string& text);

}  // namespace apex::parallel
