// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A thread that runs jobs when they are due.

#include <chrono>
#include <functional>
#include <memory>

namespace apex::parallel {

/// Nobody waits for the thread: one that is blocked in a job is left behind. Thread safe.
class JobThread {
 public:
  using Clock = std::chrono::steady_clock;

  JobThread();
  ~JobThread();  ///< jobs that are due are still run
  JobThread(const JobThread&) = delete;
  JobThread& operator=(const JobThread&) = delete;

  /// Jobs that are due are run in the order of their times.
  void run(std::function<void()> job, Clock::time_point at = Clock::now());

 private:
  struct State;

  const std::shared_ptr<State> state_;
};

}  // namespace apex::parallel
