// SPDX-License-Identifier: BSD-3-Clause
#include <apex/distributed/log.h>

#include <unistd.h>

#include <cerrno>

#include <apex/distributed/process_group.h>

namespace apex::distributed {

namespace {

void write_line(const std::string& line) {
  const std::string text = line + "\n";
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = ::write(STDERR_FILENO, text.data() + done, text.size() - done);
    if (written < 0 && errno != EINTR) return;  // nobody reads it
    if (written > 0) done += static_cast<size_t>(written);
  }
}

}  // namespace

void log(const std::string& message) {
  if (!is_initialized()) return write_line(message);
  write_line("[rank " + std::to_string(rank()) + " of " + std::to_string(world_size()) + "] " +
             message);
}

void log_once(const std::string& message) {
  if (!is_initialized() || rank() == 0) write_line(message);
}

}  // namespace apex::distributed
