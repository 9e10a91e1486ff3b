// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <mutex>

#include <apex/parallel/reducer.h>

namespace apex::parallel::detail {

/// The counters and times of a reducer. Thread safe.
class StatisticsCounter {
 public:
  void add(int64_t ReducerStatistics::* count, int64_t more = 1) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.*count += more;
  }

  void set(double ReducerStatistics::* time, double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.*time = seconds;
  }

  ReducerStatistics get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }

 private:
  mutable std::mutex mutex_;  ///< guards counts_
  ReducerStatistics counts_;
};

}  // namespace apex::parallel::detail
