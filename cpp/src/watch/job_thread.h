// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// A thread that runs jobs at given times.

#include <chrono>
#include <functional>
#include <memory>

namespace apex::parallel {

/// The thread is detached: if it is blocked in a job, it is left behind. Thread safe.
class JobThread {
 public:
  using Clock = std::chrono::steady_clock;

  JobThread();
  ~JobThread();  ///< due jobs still run
  JobThread(const JobThread&) = delete;
  JobThread& operator=(const JobThread&) = delete;

  /// Schedules `job`. Due jobs run in the order of their times.
  void run(std::function<void()> job, Clock::time_point at = Clock::now());

 private:
  struct State;

  const std::shared_ptr<State> state_;
};

}  // namespace apex::parallel
