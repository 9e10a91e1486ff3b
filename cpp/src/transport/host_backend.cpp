// SPDX-License-Identifier: BSD-3-Clause
#include "transport/host_backend.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <apex/distributed/host_backend.h>
#include <apex/error.h>

#include "comm/endings.h"
#include "comm/error_text.h"
#include "comm/host_channel.h"
#include "comm/host_hierarchy.h"
#include "comm/host_topology.h"
#include "comm/process_state.h"
#include "tensor_parts.h"
#include "torch_version.h"

namespace apex::parallel {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using Op = c10d::ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

constexpr milliseconds kSlice{1000};

thread_local const std::string* current_name = nullptr;

/// A collective of Gloo's.
class GlooWork final : public SlicedWork {
 public:
  explicit GlooWork(WorkPtr work) : work_(std::move(work)) {}

  bool isCompleted() override { return work_->isCompleted(); }

  bool wait_for(milliseconds slice) override {
    if (slice.count() == 0) return work_->isCompleted() && work_->wait();
    try {
      return work_->wait(slice);
    } catch (...) {
      if (work_->isCompleted()) throw;  // else it is the end of the slice
      return false;
    }
  }

 private:
  const WorkPtr work_;
};

/// The elements of `tensor` in order, in memory without gaps.
at::Tensor in_order(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg().contiguous();
}

bool is_in_order(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace

NamedCollective::NamedCollective(const std::string& name) : before_(current_name) {
  current_name = &name;
}

NamedCollective::~NamedCollective() { current_name = before_; }

/// A collective of a HostBackend: one or several of those that it is made of.
class BackendWork final : public SlicedWork {
 public:
  BackendWork(int rank, c10d::OpType type, const char* title, const Tensors& inputs,
              uint64_t number, std::shared_ptr<FutureThread> futures)
      : SlicedWork(rank, type, title, inputs), number_(number), futures_(std::move(futures)) {}

  bool isCompleted() override {
    if (is_over()) return true;
    try {
      return wait_for(milliseconds(0));
    } catch (...) {
      return true;  // wait() tells
    }
  }

  bool isSuccess() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return completed_ && !exception_;
  }

  /// @throws Error if a rank has ended, has failed, or is in another collective, or when its time
  /// is up, which ends the group.
  bool wait_for(milliseconds slice) override {
    const Clock::time_point until =
        Clock::now() + std::min<milliseconds>(slice, distributed::kLongestTimeout);
    if (!is_over()) {
      try {
        for (const auto& part : parts()) {
          const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
          if (!part->wait_for(std::max(left, milliseconds(0)))) return false;
        }
        settle(nullptr);
      } catch (...) {
        settle(std::current_exception());
      }
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  void leave() override {
    for (const auto& part : parts()) part->leave();
  }
  void abort() override { TORCH_CHECK(false, "a collective in shared memory ends with its group"); }
  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }
  FuturePtr getFuture() override;

  /// Waits, and returns what has gone wrong, or null.
  std::exception_ptr await() noexcept {
    try {
      wait();
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }

  /// After await(). Runs the callbacks.
  void complete_future(const std::exception_ptr& error) noexcept {
    try {
      if (error) {
        future_->setErrorIfNeeded(error);
      } else {
        future_->markCompleted(c10::IValue(outputs_));
      }
    } catch (...) {
      // A callback's own.
    }
  }

 private:
  friend class HostBackend;

  bool is_over() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return completed_;
  }

  using Parts = std::vector<c10::intrusive_ptr<SlicedWork>>;

  /// Held by whoever waits for them: settle() drops them.
  Parts parts() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return parts_;
  }

  /// Once: by whoever is first to see that all parts have completed, or that one has failed.
  void settle(std::exception_ptr error) {
    const std::lock_guard<std::mutex> lock(settling_);
    if (is_over()) return;
    if (!error) {
      try {
        const at::AutoDispatchBelowADInplaceOrView guard;
        const at::NoGradGuard no_grad;
        for (const auto& [to, from] : copies_) to.copy_(from);
        if (divisor_ != 1) {
          for (const at::Tensor& output : outputs_) output.div_(divisor_);
        }
      } catch (...) {
        error = std::current_exception();
      }
    }
    copies_.clear();
    finish(error);
    // A part holds its channel: peers learn that this rank has left when the last one is gone.
    Parts ended;  // outlives the lock
    const std::lock_guard<std::mutex> held(mutex_);
    ended.swap(parts_);
  }

  const uint64_t number_;
  const std::shared_ptr<FutureThread> futures_;
  Parts parts_;
  Tensors outputs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  ///< to what, when all have completed
  int divisor_ = 1;                                        ///< of the outputs, after that
  std::mutex settling_;  ///< taken before mutex_, which guards completed_ and exception_
  std::mutex making_;    ///< guards that future_ is made once
  FuturePtr future_;
};

/// Completes futures, on threads that there are from the first one on. A callback may wait for
/// another future: then there is one thread more.
class FutureThread : public std::enable_shared_from_this<FutureThread> {
 public:
  void add(c10::intrusive_ptr<BackendWork> work) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (this_pid() != pid_) throw Error("this process was forked from the one of its group");
      if (ended_) throw Error("the process group was destroyed");
      queue_.push_back(std::move(work));
      if (idle_ < queue_.size() && (threads_.empty() || in_callback_ == threads_.size()))
        threads_.emplace_back([self = shared_from_this()] { self->run(); });
    }
    changed_.notify_one();
  }

  /// Ends them when the queue is empty. Not here: a callback of a future may be who calls.
  void end() {
    if (this_pid() != pid_) return;
    bool busy = false;
    std::vector<std::thread> threads;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      busy = idle_ < threads_.size();
      threads.swap(threads_);
    }
    changed_.notify_all();
    if (threads.empty()) return;
    const auto held = std::make_shared<std::vector<std::thread>>(std::move(threads));
    end_elsewhere(
        [held] {
          for (std::thread& thread : *held) thread.join();
        },
        /*may_be_stuck=*/busy);
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.wait(lock, [this] { return ended_ || !queue_.empty(); });
      --idle_;
      if (queue_.empty()) return;
      c10::intrusive_ptr<BackendWork> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      const std::exception_ptr error = work->await();
      lock.lock();
      ++in_callback_;
      // Whoever calls back may wait for what is in the queue.
      if (!queue_.empty() && !ended_ && in_callback_ == threads_.size())
        threads_.emplace_back([self = shared_from_this()] { self->run(); });
      lock.unlock();
      work->complete_future(error);
      work.reset();  // its tensors may be Python's
      lock.lock();
      --in_callback_;
    }
  }

  const int64_t pid_ = this_pid();
  std::mutex mutex_;  ///< guards all below; not held while a future is completed
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<BackendWork>> queue_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  size_t in_callback_ = 0;
  bool ended_ = false;
};

FuturePtr BackendWork::getFuture() {
  const std::lock_guard<std::mutex> lock(making_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  if (is_over()) {
    complete_future(await());
    return future_;
  }
  try {
    futures_->add(c10::intrusive_ptr<BackendWork>::unsafe_reclaim_from_nonowning(this));
  } catch (...) {
    future_.reset();
    throw;
  }
  return future_;
}

/// A collective that is being issued.
class HostBackend::Call {
 public:
  Call(c10::intrusive_ptr<BackendWork> work, const char* title, milliseconds timeout)
      : work_(std::move(work)),
        what_(current_name == nullptr ? title : *current_name),
        timeout_(timeout) {}

  const std::string& what() const { return what_; }

  /// Memory in order, from where the elements of `tensor` go when all is there.
  at::Tensor output(const at::Tensor& tensor) {
    if (is_in_order(tensor)) return tensor;
    at::Tensor copy = at::empty(tensor.sizes(), tensor.options());
    work_->copies_.emplace_back(tensor, copy);
    return copy;
  }

  /// The same with the elements of `tensor` in it.
  at::Tensor in_place(const at::Tensor& tensor) {
    if (is_in_order(tensor)) return tensor;
    work_->copies_.emplace_back(tensor, in_order(tensor));
    return work_->copies_.back().second;
  }

  void copy_later(const at::Tensor& to, const at::Tensor& from) {
    work_->copies_.emplace_back(to, from);
  }

  void divide_later(int by) { work_->divisor_ = by; }

  void add(HostChannel::WorkPtr part) {
    if (timeout_ != c10d::kUnsetTimeout) part->within(timeout_);
    work_->parts_.push_back(std::move(part));
  }
  void add(HostHierarchy::WorkPtr part) { work_->parts_.push_back(std::move(part)); }
  void add(WorkPtr part) {
    work_->parts_.push_back(c10::make_intrusive<GlooWork>(std::move(part)));
  }

  WorkPtr end(Tensors outputs) {
    work_->outputs_ = std::move(outputs);
    return std::move(work_);
  }

 private:
  c10::intrusive_ptr<BackendWork> work_;
  const std::string what_;
  const milliseconds timeout_;  ///< of this collective; kUnsetTimeout: the channel's
};

namespace {

c10::intrusive_ptr<c10d::Backend::Options> options_of(const distributed::BackendRequest& request) {
  auto options = c10::make_intrusive<c10d::Backend::Options>(HostBackend::kName, request.timeout);
  options->group_name = request.group_name;
  options->global_ranks_in_group = request.global_ranks;
  return options;
}

const at::Tensor& only(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, what, ": takes one tensor, got ", tensors.size());
  return tensors.front();
}

/// `lists` has one list, of a tensor for each rank.
const Tensors& only_list(const std::vector<Tensors>& lists, int ranks, const char* what) {
  TORCH_CHECK_VALUE(lists.size() == 1, what, ": takes one list of tensors, got ", lists.size());
  const Tensors& list = lists.front();
  TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(ranks), what, ": a list of ", list.size(),
                    " tensors for ", ranks, " ranks");
  return list;
}

}  // namespace

HostBackend::HostBackend(const distributed::BackendRequest& request,
                         c10::intrusive_ptr<Backend> gloo, HostLinks links)
    : Backend(request.rank, request.size),
      options_(options_of(request)),
      gloo_(std::move(gloo)),
      links_(std::move(links)),
      futures_(std::make_shared<FutureThread>()) {}

HostBackend::~HostBackend() { shutdown(); }

void HostBackend::shutdown() { end(/*may_be_stuck=*/true); }

void HostBackend::end(bool may_be_stuck) {
  if (this_pid() != pid_) {
    // Forked: threads that Gloo would join are not there.
    gloo_.release();
    return;
  }
  futures_->end();
  links_ = {};
  // Note [Where a group ends].
  if (gloo_) end_elsewhere([gloo = std::move(gloo_)]() mutable { gloo.reset(); }, may_be_stuck);
}

const c10::intrusive_ptr<c10d::Backend>& HostBackend::gloo() const {
  if (!gloo_)
    throw Error("the process group was destroyed, or has no connections but shared memory");
  return gloo_;
}

c10::intrusive_ptr<c10d::Backend::Options> HostBackend::getBackendOptions() { return options_; }

void HostBackend::setTimeout(milliseconds timeout) {
  options_->timeout = timeout;
  timeout_is_set_ = true;
  gloo()->setTimeout(timeout);
}

void HostBackend::abort() {
  constexpr const char* kWhy = "its group was aborted";
  if (links_.channel) links_.channel->give_up(kWhy);
  give_up(kWhy);
  if (gloo_) gloo_->abort();
}

void HostBackend::give_up(const std::string& why) noexcept {
  if (links_.hierarchy) links_.hierarchy->give_up(why);
}

c10::intrusive_ptr<c10d::Backend> HostBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  distributed::BackendRequest request;
  request.group_name = options ? options->group_name : std::string();
  request.store = c10::make_intrusive<c10d::PrefixStore>(request.group_name + "/", store);
  request.rank = static_cast<int>(found - ranks.begin());
  request.size = static_cast<int>(ranks.size());
  request.timeout = options ? options->timeout : options_->timeout;
  const std::vector<uint64_t>& parents = options_->global_ranks_in_group;
  for (const int rank : ranks) {
    request.global_ranks.push_back(parents.empty() ? static_cast<uint64_t>(rank)
                                                   : parents.at(static_cast<size_t>(rank)));
  }
  return connect_host_backend(request, distributed::make_gloo_backend(request));
}

at::Tensor HostBackend::allocateTensor(long size, at::TensorOptions options) {
  if (links_.channel) return links_.channel->allocate(size, options);
  if (links_.hierarchy) return links_.hierarchy->allocate(size, options);
  return at::zeros({size}, options);
}

WorkPtr HostBackend::broadcast_changes(const Tensors& parts, int64_t root,
                                       const std::shared_ptr<std::vector<uint8_t>>& changed) {
  Call call = begin(c10d::OpType::BROADCAST, "apex:broadcast", c10d::kUnsetTimeout, parts);
  call.add(links_.channel->broadcast(call.what(), parts, root, changed));
  return call.end(parts);
}

// --- issuing ---

HostBackend::Call HostBackend::begin(c10d::OpType type, const char* title, milliseconds timeout,
                                     const Tensors& inputs) {
  if (timeout == c10d::kUnsetTimeout && timeout_is_set_) timeout = options_->timeout;
  return Call(c10::make_intrusive<BackendWork>(rank_, type, title, inputs, ++issued_, futures_),
              title, std::min<milliseconds>(timeout, distributed::kLongestTimeout));
}

/// Whether a collective of these takes the channel.
bool HostBackend::in_memory(const Tensors& tensors) const {
  return shares_memory() &&
         std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
           return tensor.is_cpu() && tensor.layout() == at::kStrided && has_memory(tensor);
         });
}

void HostBackend::require_root(int64_t root, const char* what) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, what, ": there is no rank ", root, " of ", size_);
}

WorkPtr HostBackend::barrier(const c10d::BarrierOptions& options) {
  if (!shares_memory()) return gloo()->barrier(options);
  const at::Tensor nothing = at::zeros({1}, at::kByte);
  Call call = begin(c10d::OpType::BARRIER, "apex:barrier", options.timeout, {});
  call.add(links_.channel->all_reduce(call.what(), nothing, Op::SUM));
  return call.end({nothing});
}

void HostBackend::add_all_reduce(Call& call, const at::Tensor& tensor, Op op) {
  if (links_.channel) {
    call.add(links_.channel->all_reduce(call.what(), tensor, op));
    return;
  }
  const bool divides = op == Op::AVG && !averages();
  if (divides) call.divide_later(size_);
  call.add(links_.hierarchy->all_reduce(call.what(), tensor, divides ? Op::SUM : op));
}

bool HostBackend::averages() const {
  return links_.channel || (links_.hierarchy && links_.hierarchy->averages());
}

bool HostBackend::can_all_reduce(const at::Tensor& tensor, Op op) const {
  return (shares_memory() || sums_by_host()) && HostChannel::can_all_reduce(tensor, op);
}

WorkPtr HostBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  TORCH_CHECK_VALUE(!tensors.empty(), "apex:all_reduce: takes a tensor");
  const Op op = options.reduceOp;
  const bool here = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.layout() == at::kStrided && has_memory(tensor) &&
           can_all_reduce(tensor, op);
  });
  if (here) return all_reduce_flat(tensors, options);
  if (op != Op::AVG) return gloo()->allreduce(tensors, options);
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.is_floating_point() || tensor.is_complex(),
                      "apex:all_reduce: there is no average of ", tensor.scalar_type());
  }
  // Gloo has no averages.
  c10d::AllreduceOptions sums = options;
  sums.reduceOp = c10d::ReduceOp::SUM;
  Call call = begin(c10d::OpType::ALLREDUCE, "apex:all_reduce", options.timeout, tensors);
  call.add(gloo()->allreduce(tensors, sums));
  call.divide_later(size_);
  return call.end(tensors);
}

/// Several tensors travel as one.
WorkPtr HostBackend::all_reduce_flat(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Call call = begin(c10d::OpType::ALLREDUCE, "apex:all_reduce", options.timeout, tensors);
  if (tensors.size() == 1) {
    add_all_reduce(call, call.in_place(tensors.front()), options.reduceOp);
    return call.end(tensors);
  }
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == tensors.front().scalar_type(), call.what(),
                     ": tensors of ", tensor.scalar_type(), " and ", tensors.front().scalar_type());
    numel += tensor.numel();
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor flat = allocateTensor(numel, tensors.front().options());
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor part = flat.narrow(0, offset, tensor.numel()).view(tensor.sizes());
    part.copy_(tensor);
    call.copy_later(tensor, part);
    offset += tensor.numel();
  }
  add_all_reduce(call, flat, options.reduceOp);
  return call.end(tensors);
}

WorkPtr HostBackend::allreduce_coalesced(Tensors& tensors,
                                         const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkPtr HostBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return gloo()->allreduce_sparse(tensors, options);
}

WorkPtr HostBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  constexpr const char* kTitle = "apex:broadcast";
  require_root(options.rootRank, kTitle);
  if (!in_memory(tensors)) return gloo()->broadcast(tensors, options);
  const at::Tensor& tensor = only(tensors, kTitle);
  Call call = begin(c10d::OpType::BROADCAST, kTitle, options.timeout, tensors);
  const at::Tensor to = options.rootRank == rank_ ? in_order(tensor) : call.output(tensor);
  call.add(links_.channel->broadcast(call.what(), {to}, options.rootRank));
  return call.end(tensors);
}

WorkPtr HostBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  constexpr const char* kTitle = "apex:reduce";
  require_root(options.rootRank, kTitle);
  const at::Tensor& tensor = only(tensors, kTitle);
  if (!in_memory(tensors) || !HostChannel::can_all_reduce(tensor, options.reduceOp))
    return gloo()->reduce(tensors, options);
  Call call = begin(c10d::OpType::REDUCE, kTitle, options.timeout, tensors);
  const at::Tensor mine = options.rootRank == rank_ ? call.in_place(tensor) : in_order(tensor);
  call.add(links_.channel->reduce(call.what(), mine, options.reduceOp, options.rootRank));
  return call.end(tensors);
}

WorkPtr HostBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& options) {
  constexpr const char* kTitle = "apex:all_gather";
  if (!in_memory(inputs)) return gloo()->allgather(outputs, inputs, options);
  const at::Tensor& input = only(inputs, kTitle);
  const Tensors& list = only_list(outputs, size_, kTitle);
  Call call = begin(c10d::OpType::ALLGATHER, kTitle, options.timeout, inputs);
  Tensors to;
  for (const at::Tensor& output : list) to.push_back(call.output(output));
  call.add(links_.channel->all_gather(call.what(), std::move(to), in_order(input)));
  return call.end(list);
}

void HostBackend::add_all_gather(Call& call, const at::Tensor& output, const at::Tensor& input) {
  call.add(links_.channel->all_gather(call.what(), {call.output(output)}, in_order(input)));
}

WorkPtr HostBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::AllgatherOptions& options) {
  if (!in_memory({output, input})) return gloo()->_allgather_base(output, input, options);
  Call call =
      begin(c10d::OpType::_ALLGATHER_BASE, "apex:_all_gather_base", options.timeout, {input});
  add_all_gather(call, output, input);
  return call.end({output});
}

WorkPtr HostBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& options) {
  constexpr const char* kTitle = "apex:all_gather";
  if (!in_memory(inputs)) return gloo()->allgather_coalesced(outputs, inputs, options);
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_), kTitle, ": ", outputs.size(),
                    " lists of tensors for ", size_, " ranks");
  Call call = begin(c10d::OpType::ALLGATHER_COALESCED, kTitle, options.timeout, inputs);
  Tensors all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors to;
    for (const Tensors& of_rank : outputs) {
      TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), kTitle, ": a list of ", of_rank.size(),
                        " tensors for ", inputs.size());
      all.push_back(of_rank[i]);
      to.push_back(call.output(of_rank[i]));
    }
    call.add(links_.channel->all_gather(call.what(), std::move(to), in_order(inputs[i])));
  }
  return call.end(std::move(all));
}

WorkPtr HostBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& options) {
  constexpr const char* kTitle = "apex:all_gather_into_tensor";
  if (!in_memory(outputs) || !in_memory(inputs))
    return gloo()->allgather_into_tensor_coalesced(outputs, inputs, options);
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), kTitle, ": ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  Call call = begin(c10d::OpType::COALESCED, kTitle, options.timeout, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) add_all_gather(call, outputs[i], inputs[i]);
  return call.end(outputs);
}

WorkPtr HostBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::GatherOptions& options) {
  constexpr const char* kTitle = "apex:gather";
  require_root(options.rootRank, kTitle);
  if (!in_memory(inputs)) return gloo()->gather(outputs, inputs, options);
  const at::Tensor& input = only(inputs, kTitle);
  Call call = begin(c10d::OpType::GATHER, kTitle, options.timeout, inputs);
  Tensors to, results;
  if (options.rootRank == rank_) {
    results = only_list(outputs, size_, kTitle);
    for (const at::Tensor& output : results) to.push_back(call.output(output));
  } else {
    TORCH_CHECK_VALUE(outputs.empty(), kTitle, ": only rank ", options.rootRank, " has outputs");
  }
  call.add(links_.channel->gather(call.what(), std::move(to), in_order(input), options.rootRank));
  return call.end(std::move(results));
}

WorkPtr HostBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ScatterOptions& options) {
  constexpr const char* kTitle = "apex:scatter";
  require_root(options.rootRank, kTitle);
  if (!in_memory(outputs)) return gloo()->scatter(outputs, inputs, options);
  const at::Tensor& output = only(outputs, kTitle);
  Call call = begin(c10d::OpType::SCATTER, kTitle, options.timeout, outputs);
  Tensors sent;
  if (options.rootRank == rank_) {
    const Tensors& list = only_list(inputs, size_, kTitle);
    for (const at::Tensor& input : list) sent.push_back(in_order(input));
  } else {
    TORCH_CHECK_VALUE(inputs.empty(), kTitle, ": only rank ", options.rootRank, " has inputs");
  }
  call.add(links_.channel->scatter(call.what(), call.output(output), sent, options.rootRank));
  return call.end(outputs);
}

WorkPtr HostBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  constexpr const char* kTitle = "apex:reduce_scatter";
  const at::Tensor& output = only(outputs, kTitle);
  if (!in_memory(outputs) || !HostChannel::can_all_reduce(output, options.reduceOp))
    return gloo()->reduce_scatter(outputs, inputs, options);
  const Tensors& list = only_list(inputs, size_, kTitle);
  Call call = begin(c10d::OpType::REDUCE_SCATTER, kTitle, options.timeout, list);
  Tensors sent;
  for (const at::Tensor& input : list) sent.push_back(in_order(input));
  call.add(
      links_.channel->reduce_scatter(call.what(), call.output(output), sent, options.reduceOp));
  return call.end(outputs);
}

void HostBackend::add_reduce_scatter(Call& call, const at::Tensor& output, const at::Tensor& input,
                                     Op op) {
  call.add(links_.channel->reduce_scatter(call.what(), call.output(output), {in_order(input)}, op));
}

WorkPtr HostBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  if (!in_memory({output, input}) || !HostChannel::can_all_reduce(output, options.reduceOp))
    return gloo()->_reduce_scatter_base(output, input, options);
  Call call = begin(c10d::OpType::_REDUCE_SCATTER_BASE, "apex:_reduce_scatter_base",
                    options.timeout, {input});
  add_reduce_scatter(call, output, input, options.reduceOp);
  return call.end({output});
}

WorkPtr HostBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  constexpr const char* kTitle = "apex:reduce_scatter_tensor";
  const Op op = options.reduceOp;
  const bool here = in_memory(outputs) && in_memory(inputs) &&
                    std::all_of(outputs.begin(), outputs.end(), [&](const at::Tensor& one) {
                      return HostChannel::can_all_reduce(one, op);
                    });
  if (!here) return gloo()->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), kTitle, ": ", outputs.size(), " outputs for ",
                    inputs.size(), " inputs");
  Call call = begin(c10d::OpType::COALESCED, kTitle, options.timeout, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) add_reduce_scatter(call, outputs[i], inputs[i], op);
  return call.end(outputs);
}

WorkPtr HostBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                   std::vector<int64_t>& output_sizes,
                                   std::vector<int64_t>& input_sizes,
                                   const c10d::AllToAllOptions& options) {
  constexpr const char* kTitle = "apex:all_to_all";
  if (!in_memory({output, input}))
    return gloo()->alltoall_base(output, input, output_sizes, input_sizes, options);
  const auto require_split = [&](const at::Tensor& tensor, const std::vector<int64_t>& sizes) {
    const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
    int64_t sum = 0;
    for (const int64_t size : sizes) {
      TORCH_CHECK_VALUE(size >= 0, kTitle, ": a negative split size, ", size);
      sum += size;
    }
    TORCH_CHECK_VALUE(sizes.empty() ? rows % size_ == 0 : sum == rows, kTitle, ": a tensor of ",
                      rows, " rows is not split by these sizes over ", size_, " ranks");
    TORCH_CHECK_VALUE(sizes.empty() || sizes.size() == static_cast<size_t>(size_), kTitle, ": ",
                      sizes.size(), " sizes for ", size_, " ranks");
  };
  require_split(output, output_sizes);
  require_split(input, input_sizes);
  Call call = begin(c10d::OpType::ALLTOALL_BASE, kTitle, options.timeout, {input});
  call.add(links_.channel->all_to_all(call.what(), call.output(output), in_order(input),
                                      output_sizes, input_sizes));
  return call.end({output});
}

WorkPtr HostBackend::alltoall(Tensors& outputs, Tensors& inputs,
                              const c10d::AllToAllOptions& options) {
  constexpr const char* kTitle = "apex:all_to_all";
  if (!in_memory(outputs) || !in_memory(inputs)) return gloo()->alltoall(outputs, inputs, options);
  const auto ranks = static_cast<size_t>(size_);
  TORCH_CHECK_VALUE(outputs.size() == ranks && inputs.size() == ranks, kTitle, ": lists of ",
                    outputs.size(), " and ", inputs.size(), " tensors for ", size_, " ranks");
  Call call = begin(c10d::OpType::ALLTOALL, kTitle, options.timeout, inputs);
  const at::AutoDispatchBelowADInplaceOrView guard;
  Tensors flat;
  std::vector<int64_t> sent, received;
  for (const at::Tensor& input : inputs) {
    flat.push_back(in_order(input).view({-1}));
    sent.push_back(input.numel());
  }
  int64_t numel = 0;
  for (const at::Tensor& output : outputs) {
    received.push_back(output.numel());
    numel += output.numel();
  }
  const at::Tensor all = at::empty({numel}, outputs.front().options());
  int64_t offset = 0;
  for (const at::Tensor& output : outputs) {
    call.copy_later(output, all.narrow(0, offset, output.numel()).view(output.sizes()));
    offset += output.numel();
  }
  call.add(links_.channel->all_to_all(call.what(), all, at::cat(flat), received, sent));
  return call.end(outputs);
}

WorkPtr HostBackend::send(Tensors& tensors, int destination, int tag) {
  return gloo()->send(tensors, destination, tag);
}

WorkPtr HostBackend::recv(Tensors& tensors, int source, int tag) {
  return gloo()->recv(tensors, source, tag);
}

WorkPtr HostBackend::recvAnysource(Tensors& tensors, int tag) {
  return gloo()->recvAnysource(tensors, tag);
}

void HostBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  gloo()->monitoredBarrier(options, wait_all_ranks);
}

HostBackend* find_host_backend(const c10d::ProcessGroup& group) {
  if (!detail::has_backend(group, at::kCPU)) return nullptr;
  auto& mutable_group = const_cast<c10d::ProcessGroup&>(group);
  return dynamic_cast<HostBackend*>(mutable_group.getBackend(at::kCPU).get());
}

c10::intrusive_ptr<HostBackend> connect_host_backend(const distributed::BackendRequest& request,
                                                     c10::intrusive_ptr<c10d::Backend> gloo) {
  HostLinks links = connect_host(*gloo, gloo, request.store, request.timeout);
  return c10::make_intrusive<HostBackend>(request, std::move(gloo), std::move(links));
}

}  // namespace apex::parallel

namespace apex::distributed {

using std::chrono::milliseconds;

void add_host_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group, milliseconds timeout,
                      const std::string& name, const std::vector<uint64_t>& global_ranks) {
  if (!group || !group->getStore())
    throw InvalidArgument("add_host_backend(): the group is null or has no store");
  if (timeout.count() <= 0) {
    throw InvalidArgument("add_host_backend(): the timeout is " + std::to_string(timeout.count()) +
                          " ms, but it must be positive");
  }
  BackendRequest request;
  request.store = group->getStore();
  request.rank = group->getRank();
  request.size = group->getSize();
  request.timeout = std::min<milliseconds>(timeout, kLongestTimeout);
  request.group_name = name;
  request.global_ranks = global_ranks;
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = parallel::connect_host_backend(request, make_gloo_backend(request));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CommunicationError("rank " + std::to_string(request.rank) + " of " +
                             std::to_string(request.size) +
                             " could not connect to the other ranks of its group within " +
                             std::to_string(request.timeout.count()) +
                             " ms: check that all of them were started, that none has failed, and "
                             "that the machines reach each other (" +
                             parallel::message_of(std::current_exception()) + ")");
  }
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
}

}  // namespace apex::distributed
