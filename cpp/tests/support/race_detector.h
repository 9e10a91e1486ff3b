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

/// Finds accesses to a device's memory that nothing orders, from the order in which the host asked
/// for them: it needs no device, and it does not depend on which interleaving happens to come up.
///
/// Each stream has a vector clock (L. Lamport, "Time, Clocks, and the Ordering of Events in a
/// Distributed System", CACM 1978; F. Mattern, "Virtual Time and Global States of Distributed
/// Systems", 1989): entry t of the clock of stream s says up to which operation of t everything is
/// over before the next operation of s begins. Two accesses to the same bytes, one of which writes,
/// are a race unless one is known to the other's stream.
///
/// Memory is reused as by a caching allocator: what was freed may serve the stream for which it was
/// allocated at once, whatever other streams still do with it, unless used_on() has told of them.
/// So an error is also a write to younger memory of that stream which does not know of such a use.
///
/// What one host thread has waited for counts as known to all: host threads are assumed to be
/// ordered among themselves. Thread safe.
class RaceDetector {
 public:
  using Stream = int64_t;  ///< from new_stream()
  using Block = uint64_t;  ///< from allocate()
  using Clock = std::vector<int64_t>;

  struct Access {
    Block block;
    size_t begin;  ///< the bytes [begin, end) of the block
    size_t end;
    bool writes;
  };

  Stream new_stream(std::string name);
  const std::string& name(Stream stream) const;

  Block allocate(Stream owner);
  void free(Block block);
  /// The allocator keeps the block until what `stream` has been asked for before it is freed is
  /// over.
  void used_on(Block block, Stream stream);

  /// One operation is put into `stream`.
  void operate(Stream stream, const std::string& what, const std::vector<Access>& accesses);

  /// What is over when all that `stream` has been asked for so far is over.
  Clock record(Stream stream) const;
  /// The same of all streams.
  Clock record_all() const;
  /// What `stream` is asked for from now on begins after `clock`.
  void wait(Stream stream, const Clock& clock);

  /// The host blocks until `clock` is over, because of `what`.
  void host_waits(const Clock& clock, const std::string& what);
  /// Whether the host knows that `clock` is over.
  bool host_knows(const Clock& clock) const;

  /// Adds to what was found.
  void fail(std::string error);

  /// What was found since the last reset(), one sentence each.
  std::vector<std::string> errors() const;
  /// Why the host has waited since then.
  std::vector<std::string> host_waits() const;
  int64_t operations() const;
  int64_t uses_told() const;  ///< calls of used_on()

  /// Forgets what was counted and found, and orders everything so far before everything from now
  /// on.
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
  /// A use of freed memory that its owner may not know of when it uses the memory again.
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
  uint64_t now_ = 0;  ///< of allocations and frees
  std::vector<std::string> errors_;
  std::vector<std::string> host_waits_;
  int64_t operations_ = 0;
  int64_t uses_told_ = 0;
};

}  // namespace apex::testing
