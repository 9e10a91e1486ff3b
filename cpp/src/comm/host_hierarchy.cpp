// SPDX-License-Identifier: BSD-3-Clause
#include "comm/host_hierarchy.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <apex/error.h>

#include "comm/endings.h"
#include "comm/error_text.h"
#include "comm/host_step.h"
#include "comm/host_sum.h"
#include "comm/slices.h"
#include "torch_version.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Op = c10d::ReduceOp::RedOpType;

/// A share of at most this size is not cut into pieces: one exchange instead of two.
constexpr int64_t kWholeShare = int64_t{64} << 10;
/// Minimum size of a piece.
constexpr int64_t kLeastPiece = int64_t{4} << 10;
/// Interval at which the waiting thread advances other channels of this process.
constexpr milliseconds kNap{20};
constexpr milliseconds kLong{1000};

/// `bytes` bytes of `of` as a tensor that keeps `of` alive: a message may outlive its failed
/// operation.
at::Tensor bytes_of(const at::Tensor& of, char* data, int64_t bytes) {
  return at::from_blob(data, {bytes}, [held = of](void*) mutable { held.reset(); }, at::kByte);
}

c10::intrusive_ptr<c10d::Work> all_gather(c10d::Backend& backend, at::Tensor& gathered,
                                          at::Tensor& share) {
  const auto issue = [&](at::Tensor& output, at::Tensor& input) {
    return backend._allgather_base(output, input, c10d::AllgatherOptions());
  };
  return share.numel() > kSliceBytes ? all_gather_in_slices(gathered, share, issue)
                                     : issue(gathered, share);
}

char* data_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

}  // namespace

enum class Stage : uint8_t {
  kHostSums,    ///< stage 1 runs
  kExchanging,  ///< stage 2 runs
  kExchanged,   ///< this rank's piece is summed
  kGathering,   ///< stage 3 runs
  kSummed,      ///< this rank's share is summed, or it has none
  kHandedOut,   ///< stage 4 runs or has ended; see `results`
};

struct HierarchyOperation {
  std::string what;
  at::Tensor tensor;  ///< real-valued and flat
  Op op = Op::SUM;
  std::atomic<Stage> stage{Stage::kHostSums};
  HostChannel::WorkPtr sum;  ///< of the host; null with one rank
  char* share = nullptr;     ///< this rank's share, in `tensor`
  int64_t numel = 0;         ///< of the share
  bool in_pieces = false;
  at::Tensor received;  ///< from the column
  at::Tensor piece;
  c10::intrusive_ptr<c10d::Work> exchange;          ///< in progress in the column
  c10::intrusive_ptr<c10::ivalue::Future> arrival;  ///< its future
  std::vector<HostChannel::WorkPtr> results;
};

using OperationPtr = std::shared_ptr<HierarchyOperation>;

/// State shared by a hierarchy, its thread and its Works.
class HierarchyCore : public std::enable_shared_from_this<HierarchyCore> {
 public:
  HierarchyCore(HostLayout where, HierarchyLinks links)
      : layout(std::move(where)), links_(std::move(links)) {}

  const HostLayout layout;

  void begin() {
    thread_ = std::thread([this] { run(); });
  }

  const HierarchyLinks& links() const { return links_; }

  /// False in a forked child: the thread does not exist there and may have held a mutex.
  bool is_own() const { return this_pid() == pid_; }

  void require_own_process() const {
    if (!is_own()) throw_forked();
  }

  void issue(const OperationPtr& operation) {
    const std::lock_guard<std::mutex> in_order(issuing_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failure_)
        throw Error("an earlier collective of this group failed: " + message_of(failure_));
    }
    if (links_.sums)
      operation->sum = links_.sums->all_reduce(operation->what, operation->tensor, operation->op);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(operation);
      news_ = true;
    }
    changed_.notify_all();
  }

  /// Waits at most `slice`; returns whether the result is complete.
  bool wait_for(HierarchyOperation& operation, milliseconds slice) {
    require_own_process();
    const Clock::time_point until = Clock::now() + slice;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto handed_out = [&] { return operation.stage == Stage::kHandedOut; };
      const auto ended = [&] { return handed_out() || failure_; };
      while (!changed_.wait_until(lock, std::min(until, Clock::now() + kNap), ended)) {
        if (Clock::now() >= until) return false;
        lock.unlock();
        advance_host_channels();
        lock.lock();
      }
      if (!handed_out()) std::rethrow_exception(failure_);
    }
    for (const auto& result : operation.results) {
      const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
      try {
        if (!result->wait_for(std::max(left, milliseconds(0)))) return false;
      } catch (...) {
        fail(std::current_exception());
        throw;
      }
    }
    return true;
  }

  bool is_completed(const HierarchyOperation& operation) const {
    if (operation.stage != Stage::kHandedOut) return false;
    return std::all_of(operation.results.begin(), operation.results.end(),
                       [](const auto& result) { return result->isCompleted(); });
  }

  void fail(const std::exception_ptr& error) noexcept {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failure_) return;
      failure_ = error;
      queue_.clear();
      news_ = true;
    }
    changed_.notify_all();
    const std::string why = message_of(error);
    for (const auto& channel : {links_.sums, links_.results}) {
      if (channel) channel->give_up(why);
    }
  }

  /// The thread ends once all operations are completed.
  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
  }

  bool has_failed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_ != nullptr;
  }

  /// After close(): blocks until the thread has ended and the connections are closed.
  void end() {
    thread_.join();
    links_.exchange.reset();
    links_.gather.reset();
  }

 private:
  // --- on the thread ---

  void run() noexcept {
    std::vector<OperationPtr> operations;
    for (;;) {
      operations.clear();
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return closing_ || !queue_.empty(); });
        if (queue_.empty()) return;
        operations.assign(queue_.begin(), queue_.end());
        news_ = false;
      }
      try {
        if (!advance(operations)) sleep(operations);
      } catch (...) {
        fail(std::current_exception());
      }
    }
  }

  /// Moves each operation as far as possible; returns whether any has moved.
  bool advance(const std::vector<OperationPtr>& operations) {
    bool moved = false;
    Stage before = Stage::kHandedOut;  // stage of the operation in front
    for (const OperationPtr& one : operations) {
      while (step(*one, before)) moved = true;
      before = std::min(before, one->stage.load());
    }
    if (!moved) return false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (!queue_.empty() && queue_.front()->stage == Stage::kHandedOut) queue_.pop_front();
    }
    changed_.notify_all();
    return true;
  }

  /// Moves one stage further if the input has arrived and all earlier operations entered that
  /// stage.
  bool step(HierarchyOperation& operation, Stage before) {
    switch (operation.stage.load()) {
      case Stage::kHostSums:
        if (before == Stage::kHostSums) return false;
        if (operation.sum && !operation.sum->wait_for(milliseconds(0))) return false;
        operation.sum.reset();
        APEX_HOST_STEP("host summed");
        begin_exchange(operation);
        return true;
      case Stage::kExchanging:
        if (!has_arrived(operation)) return false;
        APEX_HOST_STEP("exchanged");
        sum_hosts(operation);
        return true;
      case Stage::kExchanged:
        if (before < Stage::kGathering) return false;
        begin_gather(operation);
        return true;
      case Stage::kGathering:
        if (!has_arrived(operation)) return false;
        APEX_HOST_STEP("gathered");
        join_pieces(operation);
        return true;
      case Stage::kSummed:
        if (before < Stage::kHandedOut) return false;
        hand_out(operation);
        return true;
      case Stage::kHandedOut:
        return false;
    }
    return false;
  }

  /// Sleeps until something has changed: a message summed in the host notifies the channel, and
  /// a message from the network calls notice().
  void sleep(const std::vector<OperationPtr>& operations) {
    for (const OperationPtr& one : operations) {
      if (one->stage != Stage::kHostSums) continue;
      one->sum->wait_for(kLong, [this] { return news_.load(); });
      return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return news_.load(); });
  }

  void notice() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      news_ = true;
    }
    changed_.notify_all();
    if (links_.sums) links_.sums->wake();
  }

  void in_flight(HierarchyOperation& operation, c10::intrusive_ptr<c10d::Work> work) {
    operation.exchange = std::move(work);
    operation.arrival = operation.exchange->getFuture();
    operation.arrival->addCallback([weak = weak_from_this()](c10::ivalue::Future&) {
      if (const auto core = weak.lock()) core->notice();
    });
    APEX_HOST_STEP("sent");
  }

  static bool has_arrived(HierarchyOperation& operation) {
    // Not the Work: Gloo marks it complete slightly after its future's callback.
    if (!operation.arrival->completed()) return false;
    operation.exchange->wait();  // rethrows its error
    operation.exchange.reset();
    operation.arrival.reset();
    return true;
  }

  int hosts() const { return static_cast<int>(layout.hosts.size()); }

  void begin_exchange(HierarchyOperation& operation) {
    const auto size = static_cast<int64_t>(operation.tensor.element_size());
    if (layout.in_column()) {
      const auto [begin, end] = equal_part(operation.tensor.numel(), layout.columns, layout.place);
      operation.share = data_of(operation.tensor) + begin * size;
      operation.numel = end - begin;
    }
    if (operation.numel == 0) {
      operation.stage = Stage::kSummed;
      return;
    }
    const int64_t bytes = operation.numel * size;
    operation.in_pieces = links_.gather && bytes > std::max(kWholeShare, hosts() * kLeastPiece);
    at::Tensor share = bytes_of(operation.tensor, operation.share, bytes);
    operation.stage = Stage::kExchanging;
    if (!operation.in_pieces) {
      operation.received = at::empty({hosts() * bytes}, at::kByte);
      in_flight(operation, all_gather(*links_.exchange, operation.received, share));
      return;
    }
    std::vector<int64_t> sent;
    for (int host = 0; host < hosts(); ++host) sent.push_back(piece_numel(operation, host) * size);
    const int64_t mine = sent[static_cast<size_t>(layout.host)];
    std::vector<int64_t> received(sent.size(), mine);
    operation.received = at::empty({hosts() * mine}, at::kByte);
    const auto issue = [&](at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to,
                           std::vector<int64_t>& from) {
      return links_.exchange->alltoall_base(output, input, to, from, c10d::AllToAllOptions());
    };
    in_flight(operation, sent.front() > kSliceBytes
                             ? all_to_all_in_slices(operation.received, share, sent, issue)
                             : issue(operation.received, share, received, sent));
  }

  int64_t piece_numel(const HierarchyOperation& operation, int host) const {
    const auto [begin, end] = equal_part(operation.numel, hosts(), host);
    return end - begin;
  }

  /// Sums the hosts' contributions to the share, or to this rank's piece of it.
  void sum_hosts(HierarchyOperation& operation) {
    const auto size = static_cast<int64_t>(operation.tensor.element_size());
    const int64_t numel =
        operation.in_pieces ? piece_numel(operation, layout.host) : operation.numel;
    char* to = operation.share;
    if (operation.in_pieces) {
      // All pieces have the length of the first, which is the longest.
      operation.piece = at::empty({piece_numel(operation, 0) * size}, at::kByte);
      to = data_of(operation.piece);
    }
    std::vector<const char*> from;
    for (int host = 0; host < hosts(); ++host)
      from.push_back(data_of(operation.received) + host * numel * size);
    combine(operation.op, operation.tensor.scalar_type(), numel, from, {to});
    operation.received.reset();
    operation.stage = operation.in_pieces ? Stage::kExchanged : Stage::kSummed;
  }

  void begin_gather(HierarchyOperation& operation) {
    operation.received = at::empty({hosts() * operation.piece.numel()}, at::kByte);
    operation.stage = Stage::kGathering;
    in_flight(operation, all_gather(*links_.gather, operation.received, operation.piece));
  }

  void join_pieces(HierarchyOperation& operation) {
    const auto size = static_cast<int64_t>(operation.tensor.element_size());
    char* to = operation.share;
    for (int host = 0; host < hosts(); ++host) {
      const int64_t bytes = piece_numel(operation, host) * size;
      std::memcpy(to, data_of(operation.received) + host * operation.piece.numel(),
                  static_cast<size_t>(bytes));
      to += bytes;
    }
    operation.received.reset();
    operation.piece.reset();
    operation.stage = Stage::kSummed;
  }

  void hand_out(HierarchyOperation& operation) {
    if (links_.results) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      for (int column = 0; column < layout.columns; ++column) {
        const auto [begin, end] = equal_part(operation.tensor.numel(), layout.columns, column);
        if (begin == end) continue;
        operation.results.push_back(links_.results->broadcast(
            operation.what, {operation.tensor.narrow(0, begin, end - begin)}, column));
        APEX_HOST_STEP("handed out");
      }
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    operation.stage = Stage::kHandedOut;
  }

  const int64_t pid_ = this_pid();
  HierarchyLinks links_;
  std::thread thread_;

  std::mutex issuing_;  ///< guards the order of messages; taken before mutex_
  std::mutex mutex_;    ///< guards all below; not held during waits and calls
  std::condition_variable changed_;
  std::deque<OperationPtr> queue_;  ///< in order; without handed-out operations
  std::atomic<bool> news_{false};   ///< since the thread last checked
  bool closing_ = false;
  std::exception_ptr failure_;
};

// --- HostHierarchy ---

HostHierarchy::HostHierarchy(HostLayout layout, HierarchyLinks links)
    : core_(std::make_shared<HierarchyCore>(std::move(layout), std::move(links))) {
  core_->begin();
}

HostHierarchy::~HostHierarchy() {
  if (!core_->is_own()) {
    // A forked child does not have the thread, so it cannot end it.
    static_cast<void>(new std::shared_ptr<HierarchyCore>(std::move(core_)));
    return;
  }
  core_->close();
  const bool failed = core_->has_failed();
  end_elsewhere([core = std::move(core_)]() mutable { core->end(); }, failed);
}

bool HostHierarchy::averages() const { return core_->layout.even(); }

HostHierarchy::WorkPtr HostHierarchy::all_reduce(const std::string& what, const at::Tensor& tensor,
                                                 Op op) {
  core_->require_own_process();
  auto operation = std::make_shared<HierarchyOperation>();
  operation->what = what;
  const at::AutoDispatchBelowADInplaceOrView guard;  // no view tracking
  operation->tensor = (tensor.is_complex() ? at::view_as_real(tensor) : tensor).view({-1});
  operation->op = op;
  core_->issue(operation);
  return c10::make_intrusive<HierarchyWork>(core_, std::move(operation));
}

at::Tensor HostHierarchy::allocate(int64_t numel, const at::TensorOptions& options) const {
  const auto& sums = core_->links().sums;
  return sums ? sums->allocate(numel, options) : at::zeros({numel}, options);
}

void HostHierarchy::give_up(const std::string& why) noexcept {
  if (core_->is_own()) core_->fail(std::make_exception_ptr(Error(why)));
}

// --- HierarchyWork ---

HierarchyWork::HierarchyWork(std::shared_ptr<HierarchyCore> core,
                             std::shared_ptr<HierarchyOperation> operation)
    : SlicedWork(-1, c10d::OpType::UNKNOWN),
      core_(std::move(core)),
      operation_(std::move(operation)) {}

bool HierarchyWork::isCompleted() { return core_->is_completed(*operation_); }

bool HierarchyWork::wait_for(milliseconds slice) { return core_->wait_for(*operation_, slice); }

}  // namespace apex::parallel
