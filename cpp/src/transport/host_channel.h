// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Collectives between processes of one host, over shared memory.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "transport/futex_event.h"
#include "transport/host_memory.h"
#include "transport/host_queue.h"
#include "watch/process_state.h"

namespace apex::parallel {

// Note [Sums in shared memory]
//
// Ranks number their collectives, and all ranks issue the same ones in the same order. A rank runs
// them one after the other:
//
// - It puts its message where its peers can read it, describes it in a slot, and publishes it with
//   `posted`. Then it waits until all ranks have posted, and compares the descriptions.
// - In a large all-reduce it sums its part in rank order over all messages, and writes the sum over
//   the same part of all messages. No other rank reads or writes that part, so one pass over memory
//   is enough. It publishes that with `done`. When all parts are done, the messages hold the
//   result.
// - In every other collective it copies or sums what it needs.
//
// A message in shared memory is summed in place. Any other message is copied to shared memory and
// back, except for this rank's part, which only this rank needs.
//
// Two slots are enough. A rank posts a collective when it has finished the one before. So when all
// ranks have posted it, none uses the slots and copies of earlier ones. The slot and the copy of
// the one before last are reused without waiting.

/// Collectives between the ranks of one host; see Note [Sums in shared memory]. Thread safe.
class HostChannel : public std::enable_shared_from_this<HostChannel> {
 public:
  using WorkPtr = c10::intrusive_ptr<HostWork>;
  using JobPtr = std::shared_ptr<HostJob>;

  struct Peer {
    std::shared_ptr<PeerMemory> memory;  ///< null for this rank
    std::optional<ProcessName> process;  ///< empty for ranks that are threads
    int named = 0;                       ///< its rank in error messages
  };

  /// Size of each rank's memory: more than a program needs.
  static constexpr size_t kMemoryBytes = size_t{64} << 30;
  static constexpr int kMostRanks = 64;

  /// Creates a rank's memory.
  static std::shared_ptr<HostMemory> make_memory(size_t bytes = kMemoryBytes);

  /// @param peers  by rank.
  HostChannel(int rank, std::shared_ptr<HostMemory> memory, std::vector<Peer> peers,
              std::chrono::milliseconds timeout);

  /// Called when all collectives are over. Peers that wait for this rank are notified that it has
  /// left.
  ~HostChannel();
  HostChannel(const HostChannel&) = delete;
  HostChannel& operator=(const HostChannel&) = delete;

  /// Whether the channel supports this all-reduce; the same on every rank for the same message.
  static bool can_all_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op);

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Issue a collective. Tensors are contiguous, on the CPU, and must not change until it has
  /// completed. None of these functions waits for other ranks.
  /// @throws Error if the channel has failed before, or in a process forked since its construction.
  WorkPtr all_reduce(HostCall call, const at::Tensor& tensor, c10d::ReduceOp::RedOpType op);
  WorkPtr broadcast(HostCall call, const at::Tensor& tensor, int64_t root);
  /// Gathers `share` of every rank, in rank order, into one tensor or into one tensor per rank.
  WorkPtr all_gather(HostCall call, std::vector<at::Tensor> gathered, const at::Tensor& share);
  /// Gives each rank its share of the sum of `sent` (shaped like `gathered` above).
  WorkPtr reduce_scatter(HostCall call, const at::Tensor& received,
                         const std::vector<at::Tensor>& sent, c10d::ReduceOp::RedOpType op);

  /// Issues a job that is made of the channel's jobs, which it advances in the same order on all
  /// ranks.
  WorkPtr issue(HostCall call, JobPtr job) {
    return queue_->issue(std::move(call), std::move(job));
  }
  /// The job of all_reduce().
  JobPtr summing(const std::string& what, const at::Tensor& tensor, c10d::ReduceOp::RedOpType op);
  /// The job of all_gather(). Parts may differ in size.
  JobPtr gathering(const std::string& what, std::vector<at::Tensor> parts, const at::Tensor& own);

  /// Notifies waiting peers that this rank cannot continue, for a reason outside the channel.
  void give_up(const std::string& why) noexcept { queue_->fail(why); }
  /// Waits until all collectives that have been issued are over.
  void drain() { queue_->drain(); }

  /// @throws Error if a rank has failed, left or ended.
  void check_ranks(bool processes) const { check_ranks(processes, nullptr); }

  /// A zeroed tensor in shared memory; all_reduce() does not copy it.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options);

 private:
  enum class Kind : uint8_t { kSumWhole, kSumParts, kBroadcast, kAllGather, kReduceScatter };
  struct Control;
  struct Message;
  struct Operation;
  static constexpr size_t kCacheLine = 64;
  enum class End : uint32_t { kNone, kFailed, kLeft };
  using OperationPtr = std::shared_ptr<Operation>;

  // Describe collectives.
  OperationPtr describe(const std::string& what, Kind kind, const at::Tensor& each);
  OperationPtr describe_reduction(const std::string& what, Kind kind, const at::Tensor& received,
                                  std::vector<at::Tensor> sent, c10d::ReduceOp::RedOpType op);
  void require_shares(const std::string& what, const std::vector<at::Tensor>& of,
                      const at::Tensor& each) const;

  // Run them. Called by one thread at a time.
  bool advance(Operation& operation, std::chrono::microseconds spin);
  void post(Operation& operation);
  uint64_t stage_message(Operation& operation);
  bool all_have_come(Operation& operation, std::chrono::microseconds spin) const;
  bool waits_for(int peer, const Operation& operation) const;
  void check_messages(const Operation& operation) const;
  void do_part(Operation& operation);
  void sum_part(const Operation& operation) const;
  void take_result(const Operation& operation) const;
  char* memory_of(int rank) const {
    return rank == rank_ ? memory_->data() : peers_[static_cast<size_t>(rank)].memory->data();
  }
  const Message& message_of(int rank, const Operation& operation) const;
  std::pair<int64_t, int64_t> own_part(int64_t bytes) const;
  std::string awaited(const Operation& operation) const;
  /// `of`: only ranks for which that collective waits.
  void check_ranks(bool processes, const Operation* of) const;
  std::string name_of(int peer) const { return "rank " + std::to_string(peers_[peer].named); }
  void tell_end(End end, const std::string& why) noexcept;

  const int rank_;
  const int size_;
  const std::shared_ptr<HostMemory> memory_;
  const std::shared_ptr<HostQueue> queue_;
  std::vector<Peer> peers_;
  std::vector<Control*> controls_;  ///< by rank
  FutexEvent* event_ = nullptr;     ///< in rank 0's memory
  uint64_t next_ = 0;
  std::shared_ptr<char> staged_[2];  ///< the copies that peers read, by slot
};

}  // namespace apex::parallel
