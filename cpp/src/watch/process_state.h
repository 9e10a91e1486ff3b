// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Whether another process of this host still runs.

#include <cstdint>
#include <optional>
#include <string>

namespace apex::parallel {

/// Names a process for good: numbers of processes are used again. Comparable within one host.
struct ProcessName {
  std::string host;  ///< this boot of the host, and the namespace in which `pid` counts
  int64_t pid = 0;
  uint64_t start_time = 0;  ///< in ticks since boot

  std::string encode() const;
  static std::optional<ProcessName> decode(const std::string& text);
};

/// Empty where the system does not tell (no /proc).
std::optional<ProcessName> this_process();

/// Its number alone; 0 where there are none. Tells a process from those that it has forked.
int64_t this_pid();

/// For tests: from now on this process, and those that it forks, say that they are on another host,
/// of that name. Not while another thread asks for this_process().
void pretend_host(const std::string& name);

enum class ProcessState {
  kUnknown,  ///< it may run: on another host, or nobody can tell
  kStopped,  ///< by a signal or a debugger
  kEnded,
};

/// Asks the system; blocks for no longer than reading a file of /proc takes.
ProcessState state_of(const ProcessName& process);

}  // namespace apex::parallel
