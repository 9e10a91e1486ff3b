// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The Work of a HostBackend, and completion of Works that their callers do not wait for.

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
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "transport/host_channel.h"
#include "transport/sliced_work.h"
#include "watch/process_state.h"

namespace apex::parallel {

class BackendWorks;

/// A collective of a HostBackend: a part of one of its links or of Gloo, with a future.
class BackendWork final : public SlicedWork {
 public:
  using Tensors = std::vector<at::Tensor>;
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  /// @param title    names it in errors.
  /// @param timeout  c10d::kUnsetTimeout: the timeout of the link in use.
  BackendWork(int rank, c10d::OpType type, const char* title, uint64_t number,
              std::chrono::milliseconds timeout, const Tensors& inputs, Tensors outputs,
              std::shared_ptr<BackendWorks> works);
  /// Takes over the remaining work of a dropped Work.
  explicit BackendWork(BackendWork&& dropped);
  ~BackendWork() override;

  // Called while it is issued.

  const std::string& what() const { return what_; }
  /// Fills `tensors` from consecutive elements of `flat` when the part has completed.
  void split_later(const at::Tensor& flat, const Tensors& tensors);
  /// Then divides the outputs.
  void divide_later(int by) { divisor_ = by; }
  /// Sets the collective of a link or of Gloo that this one waits for.
  void start(const c10::intrusive_ptr<c10d::Work>& part);

  // Called after it is issued.

  bool isCompleted() override;
  bool isSuccess() const override { return is_over() && !exception_; }
  /// @throws Error if a rank has exited, has failed, or is in another collective, and on timeout,
  ///         after which the group is unusable.
  bool wait_for(std::chrono::milliseconds slice) override;
  void leave() override {
    if (const auto part = this->part()) part->leave();
  }
  Tensors result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }
  FuturePtr getFuture() override;
  /// Waits; errors are in exception().
  void await() noexcept;
  /// Call after await(). Runs the future's callbacks.
  void complete_future() noexcept;

 private:
  using Part = c10::intrusive_ptr<SlicedWork>;

  bool is_over() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return completed_;
  }
  /// A copy that the waiting thread holds, because settle() drops the part.
  Part part() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return part_;
  }
  void settle(std::exception_ptr error);

  const std::string what_;
  const uint64_t number_;
  const std::chrono::milliseconds timeout_ = c10d::kUnsetTimeout;
  const std::shared_ptr<BackendWorks> works_;  ///< null once this Work was dropped
  Part part_;
  Tensors outputs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  ///< copied when the part completes
  int divisor_ = 1;
  std::mutex settling_;  ///< taken before mutex_, which guards completed_ and exception_
  std::mutex making_;    ///< guards creation of future_
  FuturePtr future_;
};

using BackendWorkPtr = c10::intrusive_ptr<BackendWork>;

/// Works of a backend for which their callers do not wait. Threads wait for works with a future;
/// they exist from the first future on. If a callback waits for another future, another thread is
/// started. Dropped works complete when a later work is waited for.
class BackendWorks : public std::enable_shared_from_this<BackendWorks> {
 public:
  /// Waits for `work` on a thread and completes its future.
  void add_future(BackendWorkPtr work);
  void add_dropped(BackendWork&& work);
  /// Waits for dropped works with numbers below `before`.
  bool dropped_have_completed(uint64_t before, std::chrono::steady_clock::time_point until);
  /// Threads end when all futures have completed. Does not join them, since the caller may be a
  /// callback of a future.
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
