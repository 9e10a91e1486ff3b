#pragma once

/// Finds the buckets that are fastest on this link, while training goes on.

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "reducer/bucket_tuner.h"
#include "reducer/plan.h"

namespace apex::parallel::detail {

// Note [Self-tuning buckets]
//
// With auto_buckets, the plan that was recorded is observed for a few backwards: when each gradient is ready,
// and how long a backward takes. Then all-reduces of two sizes are timed, and assign_buckets_by_time()
// proposes plans, for the latency that was measured, for a fourth and for four times of it. A model that
// leaves out what it costs to communicate while computing must not have the last word, so plans with
// buckets of 1, 4, 10 and 25 MiB, small ones first, are proposed beside them. Each is tried for a few backwards,
// and the one that was fastest on the slowest rank is kept; the recorded one, unless another is clearly
// faster. After a thousand backwards it is all done again. Everything that leads to a decision is exchanged,
// so that ranks decide alike; they are asked at the same backward, since they all count the same ones.
//
// Results do not depend on the plan but for rounding: a gradient is summed over the same ranks.

/// Watches a reducer from outside; not thread safe but for gradient_ready().
class PlanTuner final : public BackwardObserver {
 public:
  explicit PlanTuner(ReducerContext& context) : context_(context) {}

  void began(std::optional<c10::Device> device, size_t parameters) override;
  void gradient_ready(size_t parameter) override;

  /// After a backward by `plan`: the plan to go on with, if it is another. Collective now and then, at the same
  /// backward on every rank; blocks the host then.
  std::optional<BucketPlan> after_backward(Plan& plan);

 private:
  double seconds() const;
  ReduceCost measure_cost() const;
  std::vector<BucketPlan> propose(const Plan& plan, const std::vector<double>& ready_s) const;

  ReducerContext& context_;
  std::chrono::steady_clock::time_point begin_;  ///< of this backward
  std::vector<double> ready_s_;                  ///< by parameter, in this backward; 0: not yet
};

}  // namespace apex::parallel::detail
