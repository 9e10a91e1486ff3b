// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Collectives between processes of one host, over shared memory.

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "transport/host_memory.h"
#include "transport/sliced_work.h"
#include "watch/process_state.h"

namespace apex::parallel {

// Note [Sums in shared memory]
//
// Ranks number their collectives, and all ranks issue the same ones in the same order. A rank that
// issues number k puts its message where its peers can read it, describes it in slot k of a ring,
// and publishes it with `posted` = k + 1. A rank that finds number k posted by all ranks does its
// part:
//
// - A large all-reduce is cut into shares. The rank that claims a share sums it in rank order,
//   directly from all messages, and writes the sum over the same share of all messages. No other
//   rank reads or writes that share, so one pass over memory is enough. When all shares are done,
//   the messages hold the result.
// - For every other collective, each rank copies what it needs.
//
// There is no thread. A rank claims shares when it issues, polls or waits for a collective: first
// the shares of its own part of the message, then, while it waits, also the shares of other ranks.
// So a rank that is busy computing after it has posted delays no peer, because waiting ranks do its
// part.
//
// A message in shared memory is summed in place. Any other message is copied to shared memory and
// back, except for its rank's own part. That part stays in private memory, where only its rank can
// sum it. When the rank stops working on the collective, it also copies this part, so that its
// peers can sum it.
//
// The order in which shares are done does not affect the result. A slot of the ring is reused when
// all ranks have finished with the collective in it. A collective issued before that is posted
// later, by the rank's next call on the channel. Issuing does not wait for the slot, since the slot
// may become free only after this rank has issued a collective in another channel. A message and
// its memory are kept alive as long as peers may read or write there.
//
// Waiting spins for some microseconds if there are at least as many processors as ranks, and then
// sleeps until the futex event is notified. Sleeps are short, and between two sleeps a rank checks
// whether the peers that it waits for are still running. While it waits in one channel, it also
// advances the other channels of its process, since two ranks may wait for each other in two
// different channels.

class HostChannel;
struct HostOperation;
enum class HostKind : uint8_t;

/// A collective of a HostChannel. It makes progress while it is polled or waited for.
class HostWork final : public SlicedWork {
 public:
  HostWork(std::shared_ptr<HostChannel> channel, std::shared_ptr<HostOperation> operation);
  /// Does not block, but may do this rank's part.
  bool isCompleted() override;
  /// @throws Error if a peer has exited, has reported a failure, or is in another collective, or on
  ///         timeout.
  bool wait_for(std::chrono::milliseconds slice) override;
  /// Sets the time to complete from now on, instead of the channel's timeout.
  void within(std::chrono::milliseconds timeout);
  /// Copies this rank's part to shared memory for its peers, as the destructor does.
  void leave() override;
  ~HostWork() override;

 private:
  const std::shared_ptr<HostChannel> channel_;
  const std::shared_ptr<HostOperation> operation_;
  std::chrono::milliseconds timeout_;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
};

/// Collectives between the ranks of one host; see Note [Sums in shared memory]. Thread safe.
class HostChannel : public std::enable_shared_from_this<HostChannel> {
 public:
  using WorkPtr = c10::intrusive_ptr<HostWork>;

  struct Peer {
    std::shared_ptr<PeerMemory> memory;  ///< null for this rank
    HostPlace first;                     ///< its first block
    std::optional<ProcessName> process;  ///< empty for ranks that are threads
    int named = -1;                      ///< its rank in error messages; -1: the same as here
  };

  /// Size of the first block of each rank's memory; few programs need a second block.
  static constexpr size_t kFirstBytes = size_t{1} << 30;
  static constexpr int kMostRanks = 64;

  /// Prepares `memory`, whose first block is untouched. Call it before peers can see the block.
  static void prepare(HostMemory& memory);

  /// @param peers  by rank.
  HostChannel(int rank, std::shared_ptr<HostMemory> memory, std::vector<Peer> peers,
              std::chrono::milliseconds timeout);

  /// Peers that wait for this rank are notified that it has left.
  ~HostChannel();
  HostChannel(const HostChannel&) = delete;
  HostChannel& operator=(const HostChannel&) = delete;

  /// Whether the channel supports this all-reduce; the same on every rank for the same message.
  static bool can_all_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op);

  /// Issue a collective. Tensors are contiguous, on the CPU, and must not change until it has
  /// completed. `what` names it in errors. None of these functions waits for other ranks.
  /// @throws Error if the channel has failed before, or in a process forked since its construction.
  WorkPtr all_reduce(const std::string& what, const at::Tensor& tensor,
                     c10d::ReduceOp::RedOpType op);
  /// Sends `parts` as one message. `changed` has one entry per part and outlives the call. If
  /// given, a part is written, and its entry set, only if its bytes differ from the root's.
  WorkPtr broadcast(const std::string& what, std::vector<at::Tensor> parts, int64_t root,
                    std::shared_ptr<std::vector<uint8_t>> changed = nullptr);
  /// Gathers `share` of every rank, in rank order, into one tensor or into one tensor per rank.
  WorkPtr all_gather(const std::string& what, std::vector<at::Tensor> gathered,
                     const at::Tensor& share);
  /// all_gather() on rank `root` only; the other ranks pass no `gathered`.
  WorkPtr gather(const std::string& what, std::vector<at::Tensor> gathered, const at::Tensor& share,
                 int64_t root);
  /// Sends each rank its share of the root's `sent` (shaped like `gathered` above); other ranks
  /// pass none.
  WorkPtr scatter(const std::string& what, const at::Tensor& received,
                  const std::vector<at::Tensor>& sent, int64_t root);
  /// As all_reduce(), but only rank `root` gets the result. Other ranks' tensors are unchanged.
  WorkPtr reduce(const std::string& what, const at::Tensor& tensor, c10d::ReduceOp::RedOpType op,
                 int64_t root);
  /// Gives each rank its share of the sum of `sent` (shaped like `gathered` above).
  WorkPtr reduce_scatter(const std::string& what, const at::Tensor& received,
                         const std::vector<at::Tensor>& sent, c10d::ReduceOp::RedOpType op);
  /// Numbers of rows (first dimension) per rank; empty lists mean equal shares.
  WorkPtr all_to_all(const std::string& what, const at::Tensor& received, const at::Tensor& sent,
                     const std::vector<int64_t>& received_numel,
                     const std::vector<int64_t>& sent_numel);

  /// Notifies waiting peers that this rank cannot continue, for a reason outside the channel.
  void give_up(const std::string& why) noexcept;

  /// A zeroed tensor in shared memory; all_reduce() does not copy it.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options);

 private:
  friend class HostWork;
  friend struct HostOperation;
  friend void advance_host_channels();
  struct Control;
  struct Common;
  struct Message;
  static constexpr size_t kCacheLine = 64;
  static constexpr uint64_t kRing = 256;
  static constexpr int kShares = 64;  ///< maximum per all-reduce
  static constexpr uint8_t kDone = 0x80;
  enum class End : uint32_t { kNone, kFailed, kLeft };
  using Operation = HostOperation;
  using Lock = std::unique_lock<std::mutex>;
  class Held;

  // Issue collectives: host_channel.cpp.
  HostPlace stage(Operation& operation, size_t bytes);
  HostPlace stage_copy(Operation& operation, const std::vector<at::Tensor>& parts);
  void require_shares(const std::string& what, const std::vector<at::Tensor>& of,
                      const at::Tensor& each) const;
  WorkPtr issue_gather(const std::string& what, HostKind kind, std::vector<at::Tensor> gathered,
                       const at::Tensor& share, int64_t root);
  WorkPtr issue_reduce(const std::string& what, HostKind kind, const at::Tensor& received,
                       const std::vector<at::Tensor>& sent, c10d::ReduceOp::RedOpType op,
                       int64_t root);
  static Message describe(HostKind kind, const at::Tensor& each, int64_t root);
  WorkPtr post(std::shared_ptr<Operation> operation, Message message);
  HostChannel& in_this_process();
  void require_usable() const;

  // Make progress: host_channel_parts.cpp.
  void post_issued();
  void advance(bool helps = false);
  static bool advance_others(const HostChannel* but);
  void begin(Operation& operation);
  void check_messages(const Operation& operation);
  void read_messages(Operation& operation);
  void take_message(Operation& operation, const std::vector<char*>& from);
  static void take_parts(const Operation& operation, const char* message);
  void sum_whole(const Operation& operation, const std::vector<char*>& from) const;
  void find_messages(Operation& operation);
  void sum_shares(Operation& operation, bool helps);
  void sum_share(int share, const Operation& operation) const;
  void take_result(const Operation& operation) const;
  void hand_over(Operation& operation);
  bool finish(Operation& operation, bool in_order);
  void complete(Operation& operation);

  // Look up state of messages and shares.
  const Message& message_of(int rank, uint64_t number) const;
  bool all_posted(uint64_t number) const;
  bool all_finished(uint64_t number) const;
  bool keeps_part(int rank, const Operation& operation) const;
  int shares_of(const Operation& operation) const;
  bool all_shares_done(const Operation& operation) const;
  std::pair<int64_t, int64_t> part_of(int rank, int64_t bytes) const;

  // Wait: host_channel_wait.cpp.
  bool wait(Lock& lock, const std::function<bool()>& done, const Operation& operation,
            std::chrono::steady_clock::time_point until);
  std::vector<int> waited_for(const Operation& operation) const;
  void check_ends(const Operation& operation, bool processes = false);
  std::string ended_process() const;
  std::string describe_ended(int peer) const;
  std::string name_of(int peer) const;
  void tell_end(End end) noexcept;
  [[noreturn]] void fail(const std::string& why);

  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<HostMemory> memory_;
  const int64_t pid_;
  bool spins_ = false;

  mutable std::mutex mutex_;  ///< guards all below; not held while this thread sleeps
  std::vector<Peer> peers_;
  std::vector<Control*> controls_;  ///< by rank
  Common* common_ = nullptr;        ///< in rank 0's memory
  uint64_t next_ = 0;
  std::deque<std::shared_ptr<Operation>> pending_;  ///< in order; kept while peers may use them
  std::string failure_;
  std::vector<at::Tensor> released_;  ///< see Held
};

/// Advances the collectives in flight of this process, for callers that wait elsewhere.
void advance_host_channels();

}  // namespace apex::parallel
