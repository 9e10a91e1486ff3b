// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The Work of a HostBackend, and what becomes of a Work that nobody waits for.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/host_channel.h"
#include "comm/sliced_work.h"
#include "watch/process_state.h"

namespace apex::parallel {

class BackendWorks;

/// The elements of `tensor` in order, in memory without gaps.
at::Tensor in_order(const at::Tensor& tensor);

/// A collective of a HostBackend: one or several of those that it is made of.
class BackendWork final : public SlicedWork {
 public:
  using Tensors = std::vector<at::Tensor>;
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  /// @param what     names it in errors.
  /// @param timeout  c10d::kUnsetTimeout: that of whatever carries it.
  BackendWork(int rank, c10d::OpType type, const char* title, std::string what, uint64_t number,
              std::chrono::milliseconds timeout, const Tensors& inputs, Tensors outputs,
              std::shared_ptr<BackendWorks> works);
  /// What is left to do for `dropped`.
  explicit BackendWork(BackendWork&& dropped);
  ~BackendWork() override;

  // While it is issued.

  const std::string& what() const { return what_; }
  /// Memory in order, from where the elements of `tensor` go when all parts have completed.
  /// @param with_elements  which are in it already.
  at::Tensor output(const at::Tensor& tensor, bool with_elements = false);
  Tensors outputs(const Tensors& tensors);
  /// The elements of `tensors` come from `flat`, one behind the other.
  void split_later(const at::Tensor& flat, const Tensors& tensors);
  /// The outputs, after that.
  void divide_later(int by) { divisor_ = by; }
  template <typename Part>
  void add(c10::intrusive_ptr<Part> part) {
    if constexpr (std::is_same_v<Part, HostWork>) {
      if (timeout_ != c10d::kUnsetTimeout) part->within(timeout_);
    }
    parts_.push_back(std::move(part));
  }
  /// A collective of Gloo's.
  void add(c10::intrusive_ptr<c10d::Work> part);

  // From then on.

  bool isCompleted() override;
  bool isSuccess() const override { return is_over() && !exception_; }
  /// @throws Error if a rank has ended, has failed, or is in another collective, or when its time
  /// is up, which ends the group.
  bool wait_for(std::chrono::milliseconds slice) override;
  void leave() override {
    for (const auto& part : parts()) part->leave();
  }
  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }
  FuturePtr getFuture() override;
  /// Waits; what is wrong is in exception().
  void await() noexcept;
  /// After await(). Runs the callbacks.
  void complete_future() noexcept;

 private:
  using Parts = std::vector<c10::intrusive_ptr<SlicedWork>>;

  bool is_over() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return completed_;
  }
  /// Held by whoever waits for them: settle() drops them.
  Parts parts() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return parts_;
  }
  void settle(std::exception_ptr error);

  const std::string what_;
  const uint64_t number_;
  const std::chrono::milliseconds timeout_ = c10d::kUnsetTimeout;
  const std::shared_ptr<BackendWorks> works_;          ///< null once it was dropped
  const int exceptions_ = std::uncaught_exceptions();  ///< when it was issued
  Parts parts_;
  Tensors outputs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  ///< to what, when all have completed
  int divisor_ = 1;
  std::mutex settling_;  ///< taken before mutex_, which guards completed_ and exception_
  std::mutex making_;    ///< guards that future_ is made once
  FuturePtr future_;
};

using BackendWorkPtr = c10::intrusive_ptr<BackendWork>;

/// The works of a backend that their callers do not wait for. Those with a future are waited for on
/// threads that there are from the first future on. A callback may wait for another future: then
/// there is one thread more. Those that were dropped complete when a later one is waited for.
class BackendWorks : public std::enable_shared_from_this<BackendWorks> {
 public:
  /// Completes its future.
  void add_future(BackendWorkPtr work);
  void add_dropped(BackendWork&& work);
  /// Those with lower numbers than `before`; waits for them.
  bool dropped_have_completed(uint64_t before, std::chrono::steady_clock::time_point until);
  /// Threads end when all futures have completed. Not here: a callback of one may be who calls.
  void end();

 private:
  void run();

  const int64_t pid_ = this_pid();
  std::atomic<bool> some_dropped_{false};
  std::mutex mutex_;  ///< guards all below; not held while a future is completed
  std::condition_variable changed_;
  std::deque<BackendWorkPtr> futures_;
  std::map<uint64_t, BackendWorkPtr> dropped_;  ///< by number
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  size_t in_callback_ = 0;
  bool ended_ = false;
};

}  // namespace apex::parallel
