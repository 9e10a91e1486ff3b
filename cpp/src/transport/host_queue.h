// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Runs the collectives of a HostChannel, one after the other.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
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

#include "distributed/backends.h"
#include "watch/process_state.h"

namespace apex::parallel {

// Note [Who runs a collective]
//
// One thread at a time runs the first collective of the queue, as far as it can without waiting for
// other ranks: a thread that issues, polls or waits, or the queue's worker. Threads that wait sleep
// without holding the queue. So a caller that waits at once does all work itself, and no thread is
// woken.
//
// The worker is for collectives that no thread waits for: because the rank computes or waits in
// another group, because the work was dropped, or because the program waits for its future. It
// starts with the first of these, and sleeps while the queue is empty. Otherwise it looks at
// intervals, which is cheaper than to be woken for each collective, and runs the queue if no thread
// waits and none has completed a collective since the last look. It runs the queue at once if a
// future is awaited, and completes the future. While a worker runs callbacks, which may wait for
// other futures, another worker takes its place.

class HostQueue;

/// A collective that has been issued. Used by one thread at a time.
class HostJob {
 public:
  virtual ~HostJob() = default;
  /// Does what this rank can do now, spinning for at most `spin` where it waits for others. Returns
  /// whether the collective is complete.
  /// @throws Error if it cannot be completed.
  virtual bool advance(std::chrono::microseconds spin) = 0;
  /// After advance() has returned false: a function that sleeps until it may do more. It may be
  /// called on several threads, and outlive the job.
  virtual std::function<void(std::chrono::milliseconds longest)> sleeper() = 0;
  /// @throws Error if a rank that it waits for has ended.
  /// @param processes  whether to look at the processes, which takes longer.
  virtual void check_ranks(bool processes) = 0;
  /// What it waits for, in words.
  virtual std::string awaited() const = 0;
};

/// How a collective is issued.
struct HostCall {
  HostCall(std::string title) : what(std::move(title)) {}  // NOLINT(google-explicit-constructor)
  HostCall(const char* title) : what(title) {}             // NOLINT(google-explicit-constructor)

  std::string what;            ///< names it in errors
  bool waits_at_once = false;  ///< the caller's next step is to wait for it
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;  ///< unset: the channel's
  // Of a Work that the program sees:
  c10d::OpType type = c10d::OpType::UNKNOWN;
  const char* profiled_as = nullptr;
  uint64_t number = 0;
  std::vector<at::Tensor> inputs = {}, outputs = {};
};

/// The Work of a collective in shared memory. Errors end the channel.
class HostWork final : public c10d::Work {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  HostWork(HostCall call, std::shared_ptr<HostJob> job, std::shared_ptr<HostQueue> queue);

  /// Does not block, but may do this rank's part.
  bool isCompleted() override;
  /// Blocks for at most `slice`; returns whether it has completed. (c10d's wait(timeout) throws at
  /// the end of a slice, which costs more than the slice.)
  /// @throws Error if a peer has exited, has reported a failure, or is in another collective, or on
  ///         timeout.
  bool wait_for(std::chrono::milliseconds slice);
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return number_; }
  FuturePtr getFuture() override;

 private:
  friend class HostQueue;

  bool is_over() { return Work::isCompleted(); }
  void complete_future() noexcept;

  const std::shared_ptr<HostQueue> queue_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::steady_clock::time_point issued_ = std::chrono::steady_clock::now();
  const uint64_t number_;
  const std::vector<at::Tensor> outputs_;
  std::shared_ptr<HostJob> job_;  ///< null once it is over
  FuturePtr future_;              ///< guarded by the queue
};

/// Thread safe. Destroyed by nobody in a forked process: see make().
class HostQueue : public std::enable_shared_from_this<HostQueue> {
 public:
  using WorkPtr = c10::intrusive_ptr<HostWork>;
  using Clock = std::chrono::steady_clock;

  /// @param spin  how long a thread spins when it begins to wait.
  /// @param tell  called once, when a collective has failed; the caller holds the queue.
  static std::shared_ptr<HostQueue> make(std::chrono::milliseconds timeout,
                                         std::chrono::microseconds spin,
                                         std::function<void(const std::string& why)> tell);

  /// @throws Error if an earlier collective has failed, or in a process forked since make().
  WorkPtr issue(HostCall call, std::shared_ptr<HostJob> job);
  /// Ends all collectives with an error.
  void fail(const std::string& why) noexcept;
  /// Waits until all collectives are over.
  void drain();
  /// The workers end when they have completed all futures. Returns whether none has failed.
  bool close();
  bool is_own() const { return this_pid() == pid_; }

 private:
  friend class HostWork;
  using Lock = std::unique_lock<std::mutex>;

  HostQueue(std::chrono::milliseconds timeout, std::chrono::microseconds spin,
            std::function<void(const std::string&)> tell)
      : timeout_(timeout), spin_(spin), tell_(std::move(tell)) {}

  void poll();
  bool wait_for(HostWork& work, Clock::time_point until);
  HostWork::FuturePtr future_of(HostWork& work);
  void run(Lock& lock, std::chrono::microseconds spin);
  void turn(Lock& lock, std::chrono::microseconds spin, Clock::time_point until);
  void end_all(Lock& lock, std::exception_ptr error);
  std::exception_ptr failed_before() const;
  void want_worker();
  void serve();

  const int64_t pid_ = this_pid();
  const std::chrono::milliseconds timeout_;
  const std::chrono::microseconds spin_;
  const std::function<void(const std::string&)> tell_;

  /// Guards all below; not held while a thread runs a job, sleeps, calls back or releases tensors.
  /// Their objects may be Python's, and a thread with the GIL may wait for the mutex.
  std::mutex mutex_;
  std::condition_variable changed_;  ///< for threads that wait while another one runs
  std::condition_variable wake_;     ///< for workers
  std::deque<WorkPtr> queue_;
  std::string failure_;
  bool running_ = false;         ///< a thread runs or ends jobs
  int waiters_ = 0;              ///< threads that wait, except workers
  uint64_t over_ = 0;            ///< number of collectives that are over
  Clock::time_point looked_;     ///< when a waiting thread looked at the processes of other ranks
  std::deque<WorkPtr> futures_;  ///< whose futures are to be completed
  std::vector<std::thread> workers_;
  size_t in_callbacks_ = 0;  ///< number of workers
  size_t parked_ = 0;        ///< number of workers that have to be woken
  bool closed_ = false;
};

}  // namespace apex::parallel
