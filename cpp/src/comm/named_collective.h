// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

namespace apex::parallel {

/// While it lives, what the collectives that this thread issues on a HostBackend are called, in
/// errors and for ranks that compare what they are in; c10d's calls have no such argument.
class NamedCollective {
 public:
  explicit NamedCollective(const std::string& name) : before_(current_) { current_ = &name; }
  ~NamedCollective() { current_ = before_; }
  NamedCollective(const NamedCollective&) = delete;
  NamedCollective& operator=(const NamedCollective&) = delete;

  /// That of the innermost one on this thread; without one, `otherwise`.
  static std::string current(const char* otherwise) {
    return current_ == nullptr ? otherwise : *current_;
  }

 private:
  static inline thread_local const std::string* current_ = nullptr;
  const std::string* const before_;
};

}  // namespace apex::parallel
