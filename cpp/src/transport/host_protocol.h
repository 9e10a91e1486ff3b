// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The layout of shared memory between the processes of a HostChannel, and a rank's state of a
/// collective in flight. Internal to HostChannel.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "transport/futex_event.h"
#include "transport/host_channel.h"
#include "transport/host_memory.h"
#include "transport/host_step.h"

namespace apex::parallel {

enum class HostKind : uint8_t {
  kSumWhole,
  kSumShares,
  kBroadcast,
  kAllGather,
  kAllToAll,
  kGather,
  kScatter,
  kReduce,
  kReduceScatter,
};

/// Whether only the root's message is read.
inline bool has_one_source(HostKind kind) {
  return kind == HostKind::kBroadcast || kind == HostKind::kScatter;
}

/// Whether only the root reads messages.
inline bool has_one_reader(HostKind kind) {
  return kind == HostKind::kGather || kind == HostKind::kReduce;
}

/// A rank's description of a collective. In shared memory.
struct HostChannel::Message {
  HostKind kind = HostKind::kSumWhole;
  bool keeps_part = false;  ///< the message lacks its rank's own part
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
  at::ScalarType dtype = at::kByte;
  int32_t root = 0;
  int64_t numel = 0;  ///< must be the same on all ranks
  HostPlace place;
  char what[168] = {};
};

/// In shared memory, at the start of each rank's first block; written by that rank.
struct HostChannel::Control {
  alignas(kCacheLine) std::atomic<uint64_t> posted{0};    ///< number of collectives posted
  alignas(kCacheLine) std::atomic<uint64_t> finished{0};  ///< collectives that it no longer reads
  std::atomic<uint64_t> handed_over[kRing / 64] = {};     ///< bit per slot: peers may sum its part
  std::atomic<End> end{End::kNone};
  char why[256] = {};  ///< error message if the rank has failed; written before `end`
  alignas(kCacheLine) Message ring[kRing];
};

/// In shared memory, after rank 0's Control; written by all ranks.
struct HostChannel::Common {
  struct Slot {
    /// 0, or rank + 1 of the rank that does this share, with kDone when it is done.
    alignas(kCacheLine) std::atomic<uint8_t> claims[kShares] = {};
    std::atomic<uint32_t> done{0};  ///< number of shares done
  };
  alignas(kCacheLine) FutexEvent event;
  Slot slots[kRing];
};

struct HostOperation {
  uint64_t number = 0;
  HostKind kind = HostKind::kSumWhole;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
  int root = 0;
  std::string what;
  std::unique_ptr<HostChannel::Message> message;  ///< null once it is posted
  at::Tensor output;                              ///< kept alive, and written
  /// Also kept alive and written. Broadcast: consecutive in the message. Gather: one per rank.
  std::vector<at::Tensor> parts;
  /// Per part, whether it was written. Null: all parts are written.
  std::shared_ptr<std::vector<uint8_t>> changed;
  int64_t bytes = 0;              ///< size of the all-reduce
  std::vector<int64_t> received;  ///< all-to-all: bytes from each rank in output
  std::shared_ptr<char> staged;   ///< the copy that peers read, if any
  std::vector<char*> messages;    ///< for sums by shares: each rank's message as peers see it
  bool keeps_part = false;        ///< its own part of the message is in `output` only
  bool begun = false;             ///< all ranks have posted it, and this rank has started it
  bool completed = false;         ///< the result is complete
};

/// Holds the mutex. Tensors are released after unlocking: the last reference may be a Python
/// object's, and another thread may hold the GIL while it waits for this mutex. Throws in a forked
/// process, where the mutex may be held by a thread that does not exist.
class HostChannel::Held {
 public:
  explicit Held(HostChannel& channel)
      : channel_(channel.in_this_process()), lock_(channel.mutex_) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    std::vector<at::Tensor> released;
    released.swap(channel_.released_);
    lock_.unlock();
  }
  Lock& lock() { return lock_; }

 private:
  HostChannel& channel_;
  Lock lock_;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint8_t>::is_always_lock_free);

/// An empty tensor may have a null address.
inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace apex::parallel
