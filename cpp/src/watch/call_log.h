// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Detects ranks that are in different collectives of one group.

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

namespace apex::parallel {

// Note [Ranks in different collectives]
//
// Collectives of a group are matched by their order. If ranks call different ones, Gloo pairs
// messages of one kind and lets other ranks wait until the timeout. So every rank numbers its
// calls. A rank that waits for long compares its last calls with the calls that another rank has
// written to the store, or writes its own calls there if there are none. If two ranks have made
// different calls under the same number, they are certainly in different collectives, however late
// either rank is.

/// The last collectives that this rank has called in one group. Thread safe.
class CallLog {
 public:
  /// The part of a collective's name that is the same on all ranks.
  static std::string in_common(const std::string& what);

  struct Last {
    int64_t number = 0;  ///< 0: no call yet
    std::string what;
    std::chrono::steady_clock::time_point began;
  };

  /// Without `what`, skips a number: there is nothing to compare.
  void add(const std::string& what);
  int64_t last_number();
  Last last();

  /// Encodes the log as text, to be compared on another rank.
  std::string encode(int rank);
  /// Compares with `theirs`, the encode() of another rank. Returns "rank 1 is in: c, while rank 0
  /// is in: b" for the first number with different calls, or an empty text.
  std::string difference(int rank, const std::string& theirs);
  /// Whether the last call in `theirs` is earlier than this rank's last call.
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
  std::chrono::steady_clock::time_point began_;  ///< when the last call began
};

}  // namespace apex::parallel
