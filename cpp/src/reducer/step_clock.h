// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <optional>

#include "comm/collectives.h"
#include "reducer/statistics.h"

namespace apex::parallel::detail {

/// Measures the times in ReducerStatistics. Not thread safe.
class StepClock {
 public:
  void backward_began() { waited_before_ = time_waited(); }
  /// All buckets of the backward are launched.
  void launched(StatisticsCounter& statistics) const {
    if (!ended_) return;
    const auto waited = time_waited() - waited_at_end_;
    statistics.set(&ReducerStatistics::last_step_compute_s,
                   seconds(Clock::now() - *ended_ - waited));
  }
  void ended(StatisticsCounter& statistics) {
    ended_ = Clock::now();
    waited_at_end_ = time_waited();
    statistics.set(&ReducerStatistics::last_backward_wait_s,
                   seconds(waited_at_end_ - waited_before_));
  }
  /// The backward has failed, so the next step is not measured.
  void dropped() { ended_.reset(); }

 private:
  using Clock = std::chrono::steady_clock;

  static double seconds(Clock::duration time) {
    return std::chrono::duration<double>(time).count();
  }

  std::optional<Clock::time_point> ended_;     ///< end of the last backward
  std::chrono::nanoseconds waited_before_{0};  ///< time_waited() when the backward began
  std::chrono::nanoseconds waited_at_end_{0};  ///< time_waited() at ended_
};

}  // namespace apex::parallel::detail
