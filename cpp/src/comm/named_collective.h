// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

namespace apex::parallel {

/// Scope guard that names the collectives which this thread issues on a HostBackend. The name
/// appears in errors and in the comparison between ranks; c10d's calls have no argument for it.
class NamedCollective {
 public:
  explicit NamedCollective(const std::string& name) : before_(current_) { current_ = &name; }
  ~NamedCollective() { current_ = before_; }
  NamedCollective(const NamedCollective&) = delete;
  NamedCollective& operator=(const NamedCollective&) = delete;

  /// The name of the innermost guard on this thread, or `otherwise`.
  static std::string current(const char* otherwise) {
    return current_ == nullptr ? otherwise : *current_;
  }

 private:
  static inline thread_local const std::string* current_ = nullptr;
  const std::string* const before_;
};

}  // namespace apex::parallel
