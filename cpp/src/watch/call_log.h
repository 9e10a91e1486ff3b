// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Finds ranks that are in different collectives of one group.

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace apex::parallel {

// Note [Ranks in different collectives]
//
// Collectives of a group are matched by their order. Where ranks call different ones, Gloo pairs
// messages of one kind and lets the others wait until the timeout. So every rank numbers its calls,
// and who waits for long compares its last calls with those that another rank has left in the
// store, if any, or leaves its own there. If two ranks have called something else under the same
// number, they are apart for certain, however late any of them is.

/// The last collectives that this rank has called in one group. Thread safe.
class CallLog {
 public:
  /// Of the name of a collective, what all ranks that are in it have in common.
  static std::string in_common(const std::string& what);

  struct Last {
    int64_t number = 0;  ///< 0: there was none
    std::string what;
    std::chrono::steady_clock::time_point began;
  };

  /// Without `what` it is a number that this rank passes over: there is nothing to compare.
  void add(const std::string& what);
  int64_t last_number();
  Last last();

  /// As a text, to be compared on another rank.
  std::string encode(int rank);
  /// "rank 1 is in: c, while rank 0 is in: b", by the first number under which `theirs`, what
  /// encode() gave on another rank, has something else; or an empty text.
  std::string difference(int rank, const std::string& theirs);
  /// Whether `theirs` ends with an earlier call than this.
  bool goes_further_than(const std::string& theirs);

 private:
  struct Call {
    int64_t number = 0;
    std::string what;
  };
  static constexpr size_t kKept = 8;

  std::mutex mutex_;  ///< guards the rest
  std::array<Call, kKept> last_;
  int64_t calls_ = 0;
  std::chrono::steady_clock::time_point began_;  ///< the last one
};

}  // namespace apex::parallel
