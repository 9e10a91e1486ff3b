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
#include "comm/process_state.h"

namespace apex::parallel {

// Note [Sums in shared memory]
//
// Ranks number their collectives, and all issue the same in the same order. A rank that issues
// number k puts its message where its peers can read it, describes it in slot k of a ring, and says
// so: `posted` = k + 1. Whoever finds that all have posted k does its part:
//
// - a large all-reduce is cut into one share a rank. Each sums its own, in the order of the ranks,
//   straight out of the peers' messages, and writes the sum over the same share of all of them:
//   nobody else reads or writes that share, and one pass over memory does it. Then it says
//   `summed` = k + 1; when all have, the messages hold the result;
// - of everything else each rank takes what it needs, and says `summed` when it has read it.
//
// A message in shared memory is summed where it lies. Of any other the shares of the peers are
// copied there, and back; the own share stays where it is.
//
// Nobody works for others and there is no thread: a rank does its part when it issues, asks for or
// waits for a collective. In which order parts are done does not matter for the result, so a rank
// may be as far ahead as the ring is long. A message and its memory are held until all have summed,
// also if whoever issued it has lost interest: peers read and write there.
//
// To wait is to look for some microseconds, if there are as many processors as ranks, and then to
// sleep until the peer that is waited for rings its bell (a futex). Sleep is short, and between two
// a rank looks whether the peer still runs.

class HostChannel;

/// A collective of a HostChannel. It makes progress while it is asked or waited for; it has no
/// future.
class HostWork final : public c10d::Work {
 public:
  HostWork(std::shared_ptr<HostChannel> channel, std::shared_ptr<struct HostOperation> operation);
  /// Does not block, but may do this rank's part.
  bool isCompleted() override;
  bool isSuccess() const override;
  /// @throws Error if a peer has ended, says that it has failed, or is in another collective, or
  /// when time is up.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  /// Waits for so long, and returns whether it has completed.
  bool wait_for(std::chrono::milliseconds slice);

 private:
  const std::shared_ptr<HostChannel> channel_;
  const std::shared_ptr<HostOperation> operation_;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
};

/// Thread safe.
class HostChannel : public std::enable_shared_from_this<HostChannel> {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  struct Peer {
    std::unique_ptr<PeerMemory> memory;  ///< null for this rank
    HostPlace first;                     ///< its first block
    std::optional<ProcessName> process;  ///< empty for ranks that are threads
  };

  /// So large has the first block of each rank's memory to be.
  static constexpr size_t kFirstBytes = size_t{4} << 20;

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
  /// completed. `what` names it in errors. None of these waits for other ranks, unless this one is
  /// ahead by as many collectives as the ring has slots.
  /// @throws Error if the channel has failed before, or the process was forked since it was made.
  WorkPtr all_reduce(const std::string& what, const at::Tensor& tensor,
                     c10d::ReduceOp::RedOpType op);
  WorkPtr broadcast(const std::string& what, const at::Tensor& tensor, int64_t root);
  /// `gathered` has `share` of every rank, in the order of the ranks.
  WorkPtr all_gather(const std::string& what, const at::Tensor& gathered, const at::Tensor& share);
  /// By rank so many elements of the first dimension; none given: as many for everybody. What
  /// arrives may be shorter than the room for it.
  WorkPtr all_to_all(const std::string& what, const at::Tensor& received, const at::Tensor& sent,
                     const std::vector<int64_t>& received_numel,
                     const std::vector<int64_t>& sent_numel);

  /// A zeroed tensor in shared memory: all_reduce() of it copies nothing.
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options);

  int size() const { return size_; }

 private:
  friend class HostWork;
  struct Control;
  struct Message;
  enum class End : uint32_t { kNone, kFailed, kLeft };

  std::shared_ptr<HostOperation> post(std::unique_lock<std::mutex>& lock,
                                      std::shared_ptr<HostOperation> operation, Message message);
  void advance();
  bool all_have(std::atomic<uint64_t> Control::*what, uint64_t number) const;
  void check_messages(HostOperation& operation);
  void do_part(HostOperation& operation);
  void sum_share(HostOperation& operation);
  void take_shares(const HostOperation& operation) const;
  const Message& message_of(int rank, uint64_t number) const;
  std::shared_ptr<char> stage(size_t bytes);
  void say(std::atomic<uint64_t> Control::*what, uint64_t value);
  bool owes(int peer, const HostOperation& operation) const;
  int behind(const HostOperation& operation) const;
  bool wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done,
            const HostOperation& operation, std::chrono::steady_clock::time_point until);
  void check_ends(const HostOperation& operation, bool processes = false);
  void tell_end(End end) noexcept;
  void require_usable() const;
  [[noreturn]] void fail(const std::string& why);
  std::pair<int64_t, int64_t> share_of(int rank, int64_t numel, size_t element) const;

  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<HostMemory> memory_;
  const int64_t pid_;
  bool spins_ = false;

  mutable std::mutex mutex_;  ///< guards all below; not held while this thread sleeps
  std::vector<Peer> peers_;
  std::vector<Control*> controls_;  ///< by rank
  uint64_t next_ = 0;
  std::deque<std::shared_ptr<HostOperation>> pending_;  ///< in order; held until all have summed
  std::string failure_;
};

}  // namespace apex::parallel
