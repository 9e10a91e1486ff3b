// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <set>

#include "step/parameter_sample.h"
#include "step/step_report.h"

namespace apex::parallel {

/// Tracks the events on this rank since its last synchronized backward. Does not communicate. Not
/// thread safe. See Note [Ranks that are out of step].
class StepTracker {
 public:
  /// @param all_reported  every step of an optimizer is reported, so that none must be inferred
  ///                      from the parameters.
  explicit StepTracker(bool all_reported) : all_reported_(all_reported) {}

  /// A gradient has arrived, in a backward that is synchronized or not.
  void gradient_arrived(bool synchronized);
  /// An optimizer that holds parameters of this reducer has stepped.
  void optimizer_stepped(int64_t optimizer);
  /// Samples `parameters`, those of bucket plan number `plan` (from 1), from now on.
  void sample(int64_t plan, const std::vector<at::Tensor>& parameters);
  /// The number of the last sampled plan; 0 if there is none.
  int64_t sampled_plan() const { return sampled_plan_; }

  /// A synchronized backward begins. `changed`: a parameter was written since the last one began.
  /// `touched_changed`: a parameter was written after it got a gradient that was not synchronized.
  void backward_began(bool changed, bool touched_changed);
  /// The facts of the backward that has begun.
  const StepFacts& facts() const { return facts_; }
  /// The backward that has begun is skipped on every rank. A rank may then call the optimizer's
  /// step or not, because there is no gradient.
  void backward_skipped() { skipped_ = true; }
  /// Ignores all events so far, and changes of parameters before the next backward.
  void forget() {
    *this = StepTracker(all_reported_);
    rebased_ = true;
  }

 private:
  bool all_reported_;
  std::set<int64_t> stepped_;  ///< optimizers, since the last gradient
  bool any_step_ = false;      ///< since the last synchronized backward began
  bool local_ = false;         ///< a gradient has arrived without synchronization since then
  bool step_after_local_ = false;
  bool idle_step_ = false;
  bool skipped_ = false;    ///< the last synchronized backward was skipped
  bool rebased_ = false;    ///< parameters were made equal on all ranks since then
  ParameterSample sample_;  ///< see Note [Writes that bump no version]
  int64_t sampled_plan_ = 0;
  ParameterSample::Change before_local_;  ///< of sample_, before the first local gradient
  StepFacts facts_;
};

}  // namespace apex::parallel
