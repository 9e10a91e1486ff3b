// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Measures the time that each rank spends in its own part of a step. Pure.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <apex/parallel/straggler_report.h>

namespace apex::parallel::detail {

// Note [Whose time it is]
//
// Ranks end a step together. So a slow rank makes the steps of all ranks equally long, and the step
// times do not show which rank is slow. Each rank's own time does. It runs from the end of a
// synchronized backward, when the rank no longer waits, until the rank has sent everything that its
// peers wait for in the next backward. The time that the rank has waited for its peers in between,
// for example in batch norms, is subtracted. The step report contains the own time (Note [One
// report per step]), so every rank knows the times of all without another message. If the program
// itself waits in collectives of torch.distributed, that counts as own time, on all ranks equally.
// A rank that has no data left and follows the others has no own time.

/// Times of one rank in one step, in microseconds.
struct StepTimes {
  int64_t own = 0;                     ///< 0: unknown
  int64_t backward = 0;                ///< the part of `own` in backward
  int64_t gap = 0;                     ///< the longest time between two gradients
  int32_t gap_from = -1, gap_to = -1;  ///< parameters; -1: before the first gradient
};

/// Measures the StepTimes of this rank. `now` is monotonic. `waited` is the total time that this
/// process has waited for other ranks.
class StepClock {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Waited = std::chrono::nanoseconds;

  void backward_began(Time now, Waited waited);
  void gradient_ready(size_t parameter, Time now, Waited waited);
  /// The times up to now. Call it when this rank has launched all its buckets.
  StepTimes times(Time now, Waited waited) const;
  /// The backward is complete, or returns to the program, which waits for it later.
  void ended(Time now, Waited waited);
  /// The step is not measured: it failed, or was of another kind.
  void dropped() { ended_.reset(); }

 private:
  struct Moment {
    Time time;
    Waited waited{0};
    int64_t since(const Moment& earlier) const;
  };

  std::optional<Moment> ended_;  ///< end of the last backward
  Moment began_;
  Moment last_;  ///< the last gradient
  int32_t last_parameter_ = -1;
  StepTimes longest_;  ///< the longest gap
};

/// Times of all ranks in the last steps.
class StepHistory {
 public:
  static constexpr size_t kSteps = 256;

  /// @param ranks  by rank. The step is ignored if the time of a rank is unknown.
  void add(const std::vector<StepTimes>& ranks);
  /// The report has no ranks if no step was added.
  StragglerReport report(const std::function<std::string(size_t parameter)>& name) const;

 private:
  std::vector<std::vector<StepTimes>> steps_;  ///< a ring buffer
  size_t next_ = 0;
};

}  // namespace apex::parallel::detail
