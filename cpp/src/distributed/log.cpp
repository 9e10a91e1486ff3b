// SPDX-License-Identifier: BSD-3-Clause
#include <apex/distributed.h>

#include "standard_error.h"

namespace apex::distributed {

void log(const std::string& message) {
  if (!is_initialized()) return write_line_to_stderr(message);
  write_line_to_stderr("[rank " + std::to_string(rank()) + " of " + std::to_string(world_size()) +
                       "] " + message);
}

void log_once(const std::string& message) {
  if (!is_initialized() || rank() == 0) write_line_to_stderr(message);
}

}  // namespace apex::distributed
