// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Checks whether another process of this host still runs.

#include <cstdint>
#include <optional>
#include <string>

namespace apex::parallel {

/// Identifies a process uniquely, although process ids are reused. Comparable within one host.
struct ProcessName {
  std::string host;  ///< boot id of the host, and the namespace of `pid`
  int64_t pid = 0;
  uint64_t start_time = 0;  ///< in ticks since boot

  std::string encode() const;
  static std::optional<ProcessName> decode(const std::string& text);
  bool operator==(const ProcessName& other) const {
    return pid == other.pid && start_time == other.start_time && host == other.host;
  }
};

/// A process of this host. nullopt if it has ended, or if the system has no /proc.
std::optional<ProcessName> process_of(int64_t pid);
std::optional<ProcessName> this_process();

/// The process id. Distinguishes a process from its forked children.
int64_t this_pid();

/// @throws Error for the use of a communicator in a process that was forked after its creation.
[[noreturn]] void throw_forked();

/// For tests: from now on this process and its forked children report `name` as their host. Not
/// while another thread calls this_process().
void pretend_host(const std::string& name);

enum class ProcessState {
  kUnknown,  ///< may be running: on another host, or not observable
  kStopped,  ///< by a signal or a debugger
  kEnded,
};

/// Queries the system; blocks only for reading a file in /proc.
ProcessState state_of(const ProcessName& process);

/// How `process` has ended: "signal 9", "exit code 1", "" for exit code 0; "exit code unknown" once
/// its parent has waited for it.
std::string outcome_of(const ProcessName& process);

}  // namespace apex::parallel
