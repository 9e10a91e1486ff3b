// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_hierarchy.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <apex/error.h>

#include "endings.h"
#include "error_text.h"
#include "transport/host_step.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Op = c10d::ReduceOp::RedOpType;

/// A larger share is all-reduced in slices of this size at once, so that messages of the two
/// directions of a connection cross.
constexpr int64_t kNetworkSliceBytes = int64_t{4} << 20;
/// Interval at which a waiting thread advances other channels of this process.
constexpr milliseconds kAdvances{20};

}  // namespace

struct HierarchyOperation {
  std::string what;
  at::Tensor tensor;  ///< real-valued and flat
  Op op = Op::SUM;
  bool done = false;
};

using OperationPtr = std::shared_ptr<HierarchyOperation>;

/// State shared by a hierarchy, its thread and its Works.
class HierarchyCore {
 public:
  HierarchyCore(HostLayout where, std::shared_ptr<HostChannel> among,
                c10::intrusive_ptr<c10d::Backend> over)
      : host(std::move(among)), layout_(std::move(where)), column_(std::move(over)) {}

  const std::shared_ptr<HostChannel> host;

  void begin() {
    thread_ = std::thread([this] { run(); });
  }

  /// False in a forked child: the thread does not exist there and may have held a mutex.
  bool is_own() const { return this_pid() == pid_; }

  void issue(const OperationPtr& operation) {
    if (!is_own()) throw_forked();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failure_)
        throw Error("an earlier collective of this group failed: " + message_of(failure_));
      queue_.push_back(operation);
    }
    changed_.notify_all();
  }

  /// Waits at most `slice`; returns whether the result is complete.
  bool wait_for(HierarchyOperation& operation, milliseconds slice) {
    if (!is_own()) throw_forked();
    const Clock::time_point until = Clock::now() + slice;
    std::unique_lock<std::mutex> lock(mutex_);
    const auto ended = [&] { return operation.done || failure_; };
    while (!changed_.wait_until(lock, std::min(until, Clock::now() + kAdvances), ended)) {
      if (Clock::now() >= until) return false;
      lock.unlock();
      advance_host_channels();
      lock.lock();
    }
    if (!operation.done) std::rethrow_exception(failure_);
    return true;
  }

  bool is_done(const HierarchyOperation& operation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return operation.done;
  }

  void fail(const std::exception_ptr& error) noexcept {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failure_) return;
      failure_ = error;
      queue_.clear();
    }
    changed_.notify_all();
    host->give_up(message_of(error));
  }

  /// The thread ends once all operations are completed. Returns whether one has failed.
  bool close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    changed_.notify_all();
    return failure_ != nullptr;
  }

  /// After close(): blocks until the thread has ended and the connections are closed.
  void end() {
    thread_.join();
    column_.reset();
  }

 private:
  void run() noexcept {
    for (std::unique_lock<std::mutex> lock(mutex_);;) {
      changed_.wait(lock, [&] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const OperationPtr operation = queue_.front();
      lock.unlock();
      try {
        all_reduce(*operation);
      } catch (...) {
        fail(std::current_exception());
      }
      lock.lock();
      if (failure_) continue;
      queue_.pop_front();
      operation->done = true;
      changed_.notify_all();
    }
  }

  at::Tensor share_of(const HierarchyOperation& operation, int place) const {
    const auto [begin, end] = equal_part(operation.tensor.numel(), layout_.places(), place);
    return operation.tensor.narrow(0, begin, end - begin);
  }

  /// See Note [Sums over several hosts].
  void all_reduce(HierarchyOperation& operation) {
    const at::AutoDispatchBelowADInplaceOrView guard;  // no view tracking
    host->all_reduce(operation.what, operation.tensor, operation.op)->wait();
    APEX_HOST_STEP("host summed");
    const at::Tensor share = share_of(operation, layout_.place);
    if (share.numel() > 0) {
      c10d::AllreduceOptions options;
      options.reduceOp = operation.op;
      std::vector<c10::intrusive_ptr<c10d::Work>> sums;
      for (const at::Tensor& slice :
           share.split(kNetworkSliceBytes / static_cast<int64_t>(share.element_size()))) {
        std::vector<at::Tensor> message{slice};
        sums.push_back(column_->allreduce(message, options));
      }
      APEX_HOST_STEP("sent");
      for (const auto& sum : sums) sum->wait();
      APEX_HOST_STEP("hosts summed");
    }
    std::vector<HostChannel::WorkPtr> results;
    for (int place = 0; place < layout_.places(); ++place) {
      const at::Tensor one = share_of(operation, place);
      if (one.numel() > 0) results.push_back(host->broadcast(operation.what, {one}, place));
      APEX_HOST_STEP("handed out");
    }
    for (const auto& result : results) result->wait();
  }

  const int64_t pid_ = this_pid();
  const HostLayout layout_;
  c10::intrusive_ptr<c10d::Backend> column_;
  std::thread thread_;

  std::mutex mutex_;  ///< guards all below, and `done` of operations; not held during collectives
  std::condition_variable changed_;
  std::deque<OperationPtr> queue_;  ///< in order
  bool closing_ = false;
  std::exception_ptr failure_;
};

// --- HostHierarchy ---

HostHierarchy::HostHierarchy(HostLayout layout, std::shared_ptr<HostChannel> host,
                             c10::intrusive_ptr<c10d::Backend> column)
    : core_(
          std::make_shared<HierarchyCore>(std::move(layout), std::move(host), std::move(column))) {
  core_->begin();
}

HostHierarchy::~HostHierarchy() {
  if (!core_->is_own()) {
    // A forked child does not have the thread, so it cannot end it.
    static_cast<void>(new std::shared_ptr<HierarchyCore>(std::move(core_)));
    return;
  }
  const bool failed = core_->close();
  end_elsewhere([core = std::move(core_)]() mutable { core->end(); }, failed);
}

bool HostHierarchy::can_all_reduce(const at::Tensor& tensor, Op op) {
  if (op == Op::AVG || !HostChannel::can_all_reduce(tensor, op)) return false;
  switch (tensor.scalar_type()) {
    case at::kShort:
    case at::kBool:
      return false;
    default:
      return op == Op::SUM || op == Op::PRODUCT || op == Op::MIN || op == Op::MAX;
  }
}

HostHierarchy::WorkPtr HostHierarchy::all_reduce(const std::string& what, const at::Tensor& tensor,
                                                 Op op) {
  auto operation = std::make_shared<HierarchyOperation>();
  operation->what = what;
  const at::AutoDispatchBelowADInplaceOrView guard;  // no view tracking
  operation->tensor = (tensor.is_complex() ? at::view_as_real(tensor) : tensor).view({-1});
  operation->op = op;
  core_->issue(operation);
  return c10::make_intrusive<HierarchyWork>(core_, std::move(operation));
}

at::Tensor HostHierarchy::allocate(int64_t numel, const at::TensorOptions& options) const {
  return core_->host->allocate(numel, options);
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

bool HierarchyWork::isCompleted() { return core_->is_done(*operation_); }

bool HierarchyWork::wait_for(milliseconds slice) { return core_->wait_for(*operation_, slice); }

}  // namespace apex::parallel
