// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <unistd.h>

#include <cerrno>
#include <string>

namespace apex {

/// Writes to stderr without buffering, and without a lock that another thread may hold.
inline void write_line_to_stderr(const std::string& line) {
  const std::string text = line + "\n";
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = ::write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (written < 0 && errno != EINTR) return;  // stderr cannot be written
    if (written > 0) done += static_cast<size_t>(written);
  }
}

}  // namespace apex
