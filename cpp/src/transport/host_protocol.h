// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The layout of shared memory between the processes of a HostChannel, and a rank's state of a
/// collective. Internal to HostChannel.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "transport/futex_event.h"
#include "transport/host_channel.h"
#include "transport/host_memory.h"
#include "transport/host_step.h"

namespace apex::parallel {

/// A rank's description of a collective. In shared memory.
struct HostChannel::Message {
  Kind kind = Kind::kSumWhole;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
  at::ScalarType dtype = at::kByte;
  int32_t root = 0;     ///< of a broadcast
  int64_t numel = 0;    ///< must be the same on all ranks
  uint64_t offset = 0;  ///< of the message in the rank's memory
  char what[168] = {};
};

/// In shared memory, at the start of each rank's first block; written by that rank. After rank 0's
/// follows the event of all ranks.
struct HostChannel::Control {
  alignas(kCacheLine) std::atomic<uint64_t> posted{0};  ///< number of collectives posted
  alignas(kCacheLine) std::atomic<uint64_t> done{0};    ///< those whose messages it needs no more
  std::atomic<End> end{End::kNone};
  char why[256] = {};  ///< error message if the rank has failed; written before `end`
  alignas(kCacheLine) Message slots[2];
};

/// A collective of this rank.
struct HostChannel::Operation final : HostJob {
  enum class Phase : uint8_t { kIssued, kPosted, kDone };

  bool advance(std::chrono::microseconds spin) override { return channel->advance(*this, spin); }
  std::function<void(std::chrono::milliseconds)> sleeper() override {
    return [event = channel->event_, keeps = channel, count = seen](std::chrono::milliseconds nap) {
      event->wait(count, nap);
    };
  }
  void check_ranks(bool processes) override { channel->check_ranks(*this, processes); }
  std::string awaited() const override { return channel->awaited(*this); }

  std::shared_ptr<HostChannel> channel;
  std::string what;
  Message message;
  std::vector<at::Tensor> sent;  ///< consecutive in the message
  at::Tensor output;             ///< kept alive, and written
  /// Also kept alive and written. Broadcast: consecutive in the message. Gather: one per rank.
  std::vector<at::Tensor> parts;
  /// Per part, whether it was written. Null: all parts are written.
  std::shared_ptr<std::vector<uint8_t>> changed;

  Phase phase = Phase::kIssued;
  uint64_t number = 0;
  bool copied = false;          ///< its message is a copy; peers see no other memory of this rank
  std::vector<char*> messages;  ///< by rank; in a broadcast only the root's is one
  uint32_t seen = 0;            ///< count of the event before the last look at the other ranks
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

/// An empty tensor may have a null address.
inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace apex::parallel
