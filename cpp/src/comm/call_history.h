// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Finds ranks that are in different collectives of one group.

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace apex::parallel {

// Note [Ranks in different collectives]
//
// Collectives of a group are matched by their order. Where ranks call different ones, Gloo pairs
// messages of one kind and lets the others wait until the timeout. So every rank numbers its calls,
// and who waits for long writes into the store what its last calls were, each under its number,
// unless another rank has written something there before. If that is something else, the ranks are
// apart for certain, however late any of them is.

/// The last collectives that this rank has called in one group. Thread safe.
class CallHistory {
 public:
  /// Of the name of a collective, what all ranks that are in it have in common.
  static std::string in_common(const std::string& what);

  void add(const std::string& what);
  int64_t last_number();

  /// Compares with what other ranks have written into `store` under the name `group`, and writes
  /// for them. Returns what is different, or an empty text. Blocks as the store does.
  std::string compare(c10d::Store& store, const std::string& group, int rank);

  /// Takes back what compare() has written.
  void forget(c10d::Store& store);

 private:
  struct Call {
    int64_t number = 0;
    std::string what;
  };
  static constexpr size_t kKept = 8;

  std::mutex mutex_;  ///< guards the rest
  std::array<Call, kKept> last_;
  int64_t calls_ = 0;
  std::vector<std::string> written_;
};

/// What the collectives that this thread issues on a HostBackend are called, in errors and for
/// ranks that compare what they are in; c10d's calls have no such argument.
class NamedCollective {
 public:
  explicit NamedCollective(const std::string& name);
  ~NamedCollective();
  NamedCollective(const NamedCollective&) = delete;
  NamedCollective& operator=(const NamedCollective&) = delete;

  /// That of the innermost one on this thread; without one, `otherwise`.
  static std::string current(const char* otherwise);

 private:
  const std::string* const before_;
};

}  // namespace apex::parallel
