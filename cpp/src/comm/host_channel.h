// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Collectives between processes of one host, over memory that they share.

#include <atomic>
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

#include "comm/host_memory.h"
#include "comm/sliced_work.h"
#include "square_sums.h"
#include "watch/process_state.h"

namespace apex::parallel {

// Note [Sums in shared memory]
//
// Ranks number their collectives, and all issue the same in the same order. A rank that issues
// number k puts its message where its peers can read it, describes it in slot k of a ring, and says
// so: `posted` = k + 1. Whoever finds that all have posted k does its part:
//
// - a large all-reduce is cut into shares. Whoever claims one sums it, in the order of the ranks,
//   straight out of all messages, and writes the sum over the same share of all of them: nobody
//   else reads or writes that share, and one pass over memory does it. When all shares are done,
//   the messages hold the result;
// - of everything else each rank takes what it needs.
//
// There is no thread: a rank claims shares when it issues, asks for or waits for a collective,
// first those of its own part of the message, and while it waits those of the others, too. So a
// rank that computes is not waited for once it has posted: those who wait do its part.
//
// A message in shared memory is summed where it lies. Any other is copied there, and back, but for
// its rank's own part, which stays where it is, and which only that rank can sum; until it loses
// interest: then it hands its part over, by copying that, too.
//
// In which order shares are done does not matter for the result. A slot of the ring is used again
// when all ranks have finished with the collective in it; what a rank issues before that is posted
// later, by whatever it does next in the channel. It does not block: the room may depend on a
// collective that this rank has yet to issue, in another channel. A message and its memory are held
// as long as peers may read or write there.
//
// To wait is to look for some microseconds, if there are as many processors as ranks, and then to
// sleep until somebody rings the bell (a futex). Sleep is short, and between two a rank looks
// whether those that it waits for still run. While it waits in one channel, it does what it can in
// the others of its process: two ranks may wait for each other in two of them.

class HostChannel;
struct HostOperation;
enum class HostKind : uint8_t;

/// A collective of a HostChannel. It makes progress while it is asked or waited for.
class HostWork final : public SlicedWork {
 public:
  HostWork(std::shared_ptr<HostChannel> channel, std::shared_ptr<HostOperation> operation);
  /// Does not block, but may do this rank's part.
  bool isCompleted() override;
  bool isSuccess() const override;
  /// @throws Error if a peer has ended, says that it has failed, or is in another collective, or
  /// when time is up.
  bool wait_for(std::chrono::milliseconds slice) override { return wait_for(slice, {}); }
  /// The same until `interrupted` says so (see HostChannel::wake()).
  bool wait_for(std::chrono::milliseconds slice, const std::function<bool()>& interrupted);
  /// From now on it has so long to complete, in place of the channel's timeout.
  void within(std::chrono::milliseconds timeout);
  /// Hands this rank's part over, as the destructor does.
  void leave() override;
  ~HostWork() override;

 private:
  const std::shared_ptr<HostChannel> channel_;
  const std::shared_ptr<HostOperation> operation_;
  std::chrono::milliseconds timeout_;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
};

/// Thread safe.
class HostChannel : public std::enable_shared_from_this<HostChannel> {
 public:
  using WorkPtr = c10::intrusive_ptr<HostWork>;

  struct Peer {
    std::unique_ptr<PeerMemory> memory;  ///< null for this rank
    HostPlace first;                     ///< its first block
    std::optional<ProcessName> process;  ///< empty for ranks that are threads
    int named = -1;                      ///< its rank as errors have it; -1: the same as here
  };

  /// So large has the first block of each rank's memory to be: few programs need another.
  static constexpr size_t kFirstBytes = size_t{1} << 30;
  static constexpr int kMostRanks = 64;

  /// Prepares `memory`, whose first block is untouched; before peers can see it.
  static void prepare(HostMemory& memory);

  /// @param peers  by rank.
  HostChannel(int rank, std::shared_ptr<HostMemory> memory, std::vector<Peer> peers,
              std::chrono::milliseconds timeout);

  /// Peers that wait for this rank hear that it has left.
  ~HostChannel();
  HostChannel(const HostChannel&) = delete;
  HostChannel& operator=(const HostChannel&) = delete;

  /// Whether these can be done here; the same on every rank for the same message.
  static bool can_all_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op);

  /// Issue a collective. Tensors are contiguous, on the CPU, and stay as they are until it has
  /// completed. `what` names it in errors. None of these waits for other ranks.
  /// @throws Error if the channel has failed before, or the process was forked since it was made.
  /// @param squares  what to measure, of floating-point elements: on every rank or on none.
  WorkPtr all_reduce(const std::string& what, const at::Tensor& tensor,
                     c10d::ReduceOp::RedOpType op, std::shared_ptr<SquareSums> squares = nullptr);
  /// `parts` travel as one message. With `changed`, which has one entry for each and outlives the
  /// call, a part is written, and its entry set, only if its bytes are others than the root's.
  WorkPtr broadcast(const std::string& what, std::vector<at::Tensor> parts, int64_t root,
                    std::shared_ptr<std::vector<uint8_t>> changed = nullptr);
  /// `gathered` has `share` of every rank, in the order of the ranks: one tensor, or one for each.
  WorkPtr all_gather(const std::string& what, std::vector<at::Tensor> gathered,
                     const at::Tensor& share);
  /// Overwrites `parts[rank]` by those of that rank, none of them before all ranks have given
  /// theirs: in total as many bytes on every rank. This rank's go through `staged`, which it has
  /// from allocate(), with room for them; it stays as it is while peers may read there.
  WorkPtr all_gather_parts(const std::string& what,
                           const std::vector<std::vector<at::Tensor>>& parts,
                           const at::Tensor& staged);
  /// all_gather() on rank `root` only; the others give no `gathered`.
  WorkPtr gather(const std::string& what, std::vector<at::Tensor> gathered, const at::Tensor& share,
                 int64_t root);
  /// Rank `root` has in `sent` what each rank receives, as `gathered` above; the others give none.
  WorkPtr scatter(const std::string& what, const at::Tensor& received,
                  const std::vector<at::Tensor>& sent, int64_t root);
  /// As all_reduce(), but only rank `root` gets the result; the tensors of the others stay as they
  /// are.
  WorkPtr reduce(const std::string& what, const at::Tensor& tensor, c10d::ReduceOp::RedOpType op,
                 int64_t root);
  /// Each rank gets its share of an all_reduce() of `sent`, which is as `gathered` above.
  WorkPtr reduce_scatter(const std::string& what, const at::Tensor& received,
                         const std::vector<at::Tensor>& sent, c10d::ReduceOp::RedOpType op);
  /// Numbers of elements of the first dimension, by rank; none given: the same number for each.
  WorkPtr all_to_all(const std::string& what, const at::Tensor& received, const at::Tensor& sent,
                     const std::vector<int64_t>& received_numel,
                     const std::vector<int64_t>& sent_numel);

  /// This rank cannot go on, for a reason outside the channel: peers that wait for it hear of it.
  void give_up(const std::string& why) noexcept;
  /// Those who wait look at what has changed, also at what HostWork::wait_for() was given.
  void wake() noexcept;

  /// A zeroed tensor in shared memory: all_reduce() of it copies nothing.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options);

  int size() const { return size_; }

 private:
  friend class HostWork;
  friend struct HostOperation;
  friend void advance_host_channels();
  struct Control;
  struct Common;
  struct Message;
  static constexpr size_t kCacheLine = 64;
  static constexpr uint64_t kRing = 256;
  static constexpr int kShares = 64;  ///< of an all-reduce, at most
  static constexpr uint8_t kDone = 0x80;
  enum class End : uint32_t { kNone, kFailed, kLeft };
  using Operation = HostOperation;
  using Lock = std::unique_lock<std::mutex>;
  class Held;

  // Issuing: host_channel.cpp.
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

  // Doing what can be done: host_channel_parts.cpp.
  void post_issued();
  void advance(bool helps = false);
  static bool advance_others(const HostChannel* but);
  void begin(Operation& operation);
  void check_messages(const Operation& operation);
  void read_messages(Operation& operation);
  void take_message(Operation& operation, const std::vector<char*>& from);
  static void take_parts(const Operation& operation, const char* message);
  void sum_whole(const Operation& operation, const std::vector<char*>& from) const;
  void take_parts_of_peers(const Operation& operation, const std::vector<char*>& from) const;
  void find_messages(Operation& operation);
  void sum_shares(Operation& operation, bool helps);
  void sum_share(int share, const Operation& operation) const;
  void take_result(const Operation& operation) const;
  void hand_over(Operation& operation);
  bool finish(Operation& operation, bool in_order);
  void complete(Operation& operation);

  // What is where.
  const Message& message_of(int rank, uint64_t number) const;
  bool all_posted(uint64_t number) const;
  bool all_finished(uint64_t number) const;
  bool keeps_part(int rank, const Operation& operation) const;
  int shares_of(const Operation& operation) const;
  bool all_shares_done(const Operation& operation) const;
  std::pair<int64_t, int64_t> part_of(int rank, int64_t bytes) const;

  // Waiting: host_channel_wait.cpp.
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
  Common* common_ = nullptr;        ///< at rank 0
  uint64_t next_ = 0;
  std::deque<std::shared_ptr<Operation>> pending_;  ///< in order; held while peers may use them
  std::string failure_;
  std::vector<at::Tensor> released_;  ///< see Held
};

/// Does what this process can do for collectives that are in flight; for who waits elsewhere.
void advance_host_channels();

}  // namespace apex::parallel
