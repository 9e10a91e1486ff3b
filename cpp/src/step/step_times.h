// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Where the time of a rank's own part of a step goes. Pure.

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
// Ranks end a step together, so a rank that is slow makes the step of all as long, and the times of
// their steps say nothing about who it is. What does is each rank's own time: from the end of a
// synchronized backward, when it has nothing left to wait for, to when it has sent all that the
// others wait for in the next one; less what it has waited for them in between, as batch norms do.
// A row of the step report has it (Note [One report per step]), so every rank knows those of all,
// without a message of its own. What a program waits for by itself, in collectives of
// torch.distributed, counts as its own, on all ranks alike. Where a rank has no data left and
// follows the others, there is nothing to compare.

/// In microseconds.
struct StepTimes {
  int64_t own = 0;                     ///< 0: not known
  int64_t backward = 0;                ///< of that
  int64_t gap = 0;                     ///< the longest time between two gradients
  int32_t gap_from = -1, gap_to = -1;  ///< parameters; -1: before the first gradient
};

/// This rank's clock. `now` never goes back; `waited` is how long the process has waited for other
/// ranks so far.
class StepClock {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Waited = std::chrono::nanoseconds;

  void backward_began(Time now, Waited waited);
  void gradient_ready(size_t parameter, Time now, Waited waited);
  /// All buckets are on their way, or may be as soon as the others'.
  StepTimes times(Time now, Waited waited) const;
  /// Nothing is left to wait for, or it returns to the program that will wait later.
  void ended(Time now, Waited waited);
  /// The step does not count: it failed, or was of another kind.
  void dropped() { ended_.reset(); }

 private:
  struct Moment {
    Time time;
    Waited waited{0};
    int64_t since(const Moment& earlier) const;
  };

  std::optional<Moment> ended_;  ///< the last backward
  Moment began_;
  Moment last_;  ///< gradient
  int32_t last_parameter_ = -1;
  StepTimes longest_;  ///< its gap
};

/// Times of all ranks in the last steps.
class StepHistory {
 public:
  static constexpr size_t kSteps = 256;

  /// By rank. One that is not known makes the step not count.
  void add(const std::vector<StepTimes>& ranks);
  /// Of no step: without ranks.
  StragglerReport report(const std::function<std::string(size_t parameter)>& name) const;

 private:
  std::vector<std::vector<StepTimes>> steps_;  ///< a ring
  size_t next_ = 0;
};

}  // namespace apex::parallel::detail
