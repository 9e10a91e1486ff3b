// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace apex::testing {

/// Detects unordered accesses to a device's memory. It needs no device: it uses the order in which
/// the host enqueues operations, so the result does not depend on the actual interleaving.
///
/// Each stream has a vector clock (L. Lamport, "Time, Clocks, and the Ordering of Events in a
/// Distributed System", CACM 1978; F. Mattern, "Virtual Time and Global States of Distributed
/// Systems", 1989). Entry t of stream s's clock is the last operation of t that completes before
/// the next operation of s begins. Two accesses to the same bytes, at least one of them a write,
/// are a race unless one is ordered before the other.
///
/// Memory is reused as in a caching allocator: a freed block may be reused immediately on the
/// stream for which it was allocated, even if other streams still use it, unless used_on() has
/// registered them. So a write to reused memory is also an error if it is not ordered after such a
/// use.
///
/// All host threads are assumed to be ordered among each other: what one of them has waited for
/// counts for all. Thread safe.
class RaceDetector {
 public:
  using Stream = int64_t;  ///< from new_stream()
  using Block = uint64_t;  ///< from allocate()
  using Clock = std::vector<int64_t>;

  struct Access {
    Block block;
    size_t begin;  ///< byte range [begin, end) of the block
    size_t end;
    bool writes;
  };

  Stream new_stream(std::string name);
  const std::string& name(Stream stream) const;

  Block allocate(Stream owner);
  void free(Block block);
  /// Keeps a freed block until the work enqueued on `stream` before the free is complete.
  void used_on(Block block, Stream stream);

  /// Records an operation on `stream`.
  void operate(Stream stream, const std::string& what, const std::vector<Access>& accesses);

  /// A clock that is complete once all work enqueued on `stream` so far is complete.
  Clock record(Stream stream) const;
  /// Later operations of `stream` begin after `clock`.
  void wait(Stream stream, const Clock& clock);

  /// The host blocks until `clock` is over, because of `what`.
  void host_waits(const Clock& clock, const std::string& what);
  /// Whether the host has waited for `clock`.
  bool host_knows(const Clock& clock) const;

  /// Adds to errors().
  void fail(std::string error);

  /// Errors since the last reset(), one sentence each.
  std::vector<std::string> errors() const;
  /// Reasons for host waits since then.
  std::vector<std::string> host_waits() const;
  int64_t operations() const;

  /// Clears counters and errors, and orders all past operations before all future ones.
  void reset();

 private:
  struct Use {
    Stream stream;
    int64_t time;
    size_t begin;
    size_t end;
    bool writes;
    std::string what;
  };
  struct BlockState {
    Stream owner;
    uint64_t born;
    std::vector<Use> uses;
    std::set<Stream> told;
  };
  /// A use of freed memory that may not be ordered before the owner's reuse of that memory.
  struct Ghost {
    uint64_t freed;
    Use use;
  };

  bool knows(const Clock& clock, const Use& use) const;
  void check_reuse(Stream stream, const std::string& what, const BlockState& block);
  void report(std::string error);

  mutable std::mutex mutex_;
  std::vector<std::string> names_;
  std::vector<Clock> clocks_;
  Clock host_;
  std::map<Block, BlockState> blocks_;
  std::map<Stream, std::vector<Ghost>> ghosts_;  ///< by owner
  Block next_block_ = 0;
  uint64_t now_ = 0;  ///< counts allocations and frees
  std::vector<std::string> errors_;
  std::vector<std::string> host_waits_;
  int64_t operations_ = 0;
};

}  // namespace apex::testing
