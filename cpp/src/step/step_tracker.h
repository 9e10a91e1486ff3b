// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <set>

#include "step/parameter_sample.h"
#include "step/step_report.h"

namespace apex::parallel {

/// What has happened on this rank since its last synchronized backward. Knows nothing of other
/// ranks; not thread safe. See Note [Ranks that are out of step].
class StepTracker {
 public:
  /// A gradient has arrived, in a backward that is synchronized or not.
  void gradient_arrived(bool synchronized);
  /// An optimizer that holds parameters of this reducer has stepped. `all`: the steps of every
  /// optimizer are reported, so there is no need to conclude any from the parameters.
  void optimizer_stepped(int64_t optimizer, bool all = true);
  /// From here on looks at some of `parameters`, those of bucket plan number `plan` (from 1).
  void sample(int64_t plan, const std::vector<at::Tensor>& parameters);
  /// The last one, 0 for none.
  int64_t sampled_plan() const { return sampled_plan_; }

  /// A synchronized backward begins. `changed`: a parameter was written since the last one began;
  /// `touched_changed`: one was written since it got a gradient that was not synchronized.
  void backward_began(bool changed, bool touched_changed);
  /// Of the backward that has begun.
  const StepFacts& facts() const { return facts_; }
  /// The backward that has begun is skipped on every rank, so a rank may leave out the optimizer's
  /// step that follows, or take it: there is no gradient to step.
  void backward_skipped() { skipped_ = true; }
  /// What has happened does not count, nor what happens to parameters before the next backward.
  void forget() {
    *this = {};
    rebased_ = true;
  }

 private:
  std::set<int64_t> stepped_;  ///< optimizers, since the last gradient
  bool any_step_ = false;      ///< since the last synchronized backward began
  bool local_ = false;         ///< a gradient has arrived without synchronization since then
  bool step_after_local_ = false;
  bool idle_step_ = false;
  bool skipped_ = false;       ///< the last synchronized backward
  bool all_reported_ = false;  ///< some step since then, by a caller who reports all
  bool rebased_ = false;       ///< parameters were made equal on all ranks since then
  ParameterSample sample_;     ///< see Note [Writes that move no version]
  int64_t sampled_plan_ = 0;
  ParameterSample::Change before_local_;  ///< of it, before the first gradient of `local_`
  StepFacts facts_;
};

}  // namespace apex::parallel
