// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What the processes of a HostChannel write for each other, and what a rank keeps of a collective
/// in flight. For the sources of HostChannel.

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

#include "comm/bell.h"
#include "comm/host_channel.h"
#include "comm/host_memory.h"
#include "comm/host_step.h"
#include "square_sums.h"

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

/// Only the message of the root is read.
inline bool has_one_source(HostKind kind) {
  return kind == HostKind::kBroadcast || kind == HostKind::kScatter;
}

/// Only the root reads messages.
inline bool has_one_reader(HostKind kind) {
  return kind == HostKind::kGather || kind == HostKind::kReduce;
}

/// What a rank says of a collective. In shared memory.
struct HostChannel::Message {
  HostKind kind = HostKind::kSumWhole;
  bool keeps_part = false;  ///< the rank's own part of the message is not there
  bool measured = false;    ///< SquareSums are asked for: by all ranks or by none
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
  at::ScalarType dtype = at::kByte;
  int32_t root = 0;
  int64_t numel = 0;  ///< has to be the same on all ranks
  HostPlace place;
  char what[168] = {};
};

/// In shared memory, at the beginning of each rank's first block; written by its rank.
struct HostChannel::Control {
  alignas(kCacheLine) std::atomic<uint64_t> posted{0};    ///< collectives
  alignas(kCacheLine) std::atomic<uint64_t> finished{0};  ///< this rank reads no more of so many
  std::atomic<uint64_t> handed_over[kRing / 64] = {};     ///< bits by slot: its part is there now
  std::atomic<End> end{End::kNone};
  char why[256] = {};  ///< it has failed; written before `end`
  alignas(kCacheLine) Message ring[kRing];
};

/// In shared memory, behind rank 0's Control; written by all.
struct HostChannel::Common {
  struct Slot {
    /// 0, or rank + 1 of who does this share, with kDone when it is done.
    alignas(kCacheLine) std::atomic<uint8_t> claims[kShares] = {};
    std::atomic<uint32_t> done{0};  ///< shares
    /// Of a measured sum, by share, written before it is done: of the result, and of what the rank
    /// gave whose part it is.
    double squares[kShares] = {}, kept[kShares] = {};
  };
  alignas(kCacheLine) Bell bell;
  Slot slots[kRing];
};

struct HostOperation {
  uint64_t number = 0;
  HostKind kind = HostKind::kSumWhole;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
  int root = 0;
  std::string what;
  std::unique_ptr<HostChannel::Message> message;  ///< until it is posted
  at::Tensor output;                              ///< held, and written
  /// Likewise: of a broadcast one behind the other in the message; gathered, one for each rank.
  std::vector<at::Tensor> parts;
  /// Of all_gather_parts(): the first part of each rank, and behind the last one. Else empty.
  std::vector<size_t> first_parts;
  /// By part: whether it was written. Null: all of them are.
  std::shared_ptr<std::vector<uint8_t>> changed;
  std::shared_ptr<SquareSums> squares;  ///< of an all-reduce; null: nobody asks
  int64_t bytes = 0;                    ///< of it
  std::vector<int64_t> received;        ///< all-to-all: bytes of each rank in output
  std::shared_ptr<char> staged;         ///< what peers read, if it is a copy
  std::vector<char*> messages;          ///< summed by shares: of each rank, as its peers see them
  bool keeps_part = false;              ///< of its own message, the part is in `output` only
  bool begun = false;                   ///< all ranks have posted it, and this one has looked at it
  bool completed = false;               ///< the result is there
};

/// The mutex, held. Tensors are let go of when it is not: their last reference may be Python's,
/// whose lock another thread may hold while it waits for this one. Throws in a forked process,
/// where the mutex may be held by a thread that is not there.
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

/// Of an empty tensor there may be no address.
inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace apex::parallel
