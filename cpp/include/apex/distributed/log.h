// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include <apex/export.h>

/// Logging with the rank as prefix. Not collective; callable from any thread. A line is written to
/// stderr in one write, so that lines of several ranks in a terminal do not mix.

namespace apex::distributed {

/// Writes "[rank 1 of 4] " and `message`; the message alone without a default group.
///
///     apex::distributed::log("read " + std::to_string(count) + " images");
APEX_API void log(const std::string& message);

/// Writes `message` on rank 0 only. Without a default group, every process writes it.
///
///     apex::distributed::log_once("epoch " + std::to_string(epoch));
APEX_API void log_once(const std::string& message);

}  // namespace apex::distributed
