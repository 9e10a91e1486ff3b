// SPDX-License-Identifier: BSD-3-Clause
#include "step/step_tracker.h"

namespace apex::parallel {

void StepTracker::gradient_arrived(bool synchronized) {
  stepped_.clear();
  if (synchronized || local_) return;
  local_ = true;
  before_local_ = sample_.take();
}

void StepTracker::sample(int64_t plan, const std::vector<at::Tensor>& parameters) {
  sampled_plan_ = plan;
  sample_.watch(parameters);
}

void StepTracker::optimizer_stepped(int64_t optimizer) {
  idle_step_ = !stepped_.insert(optimizer).second || idle_step_;
  any_step_ = true;
  step_after_local_ = step_after_local_ || local_;
}

void StepTracker::backward_began(bool changed, bool touched_changed) {
  const ParameterSample::Change last = sample_.take();
  if (rebased_) changed = touched_changed = false;
  facts_.idle_step = idle_step_;
  facts_.updated = (any_step_ && !skipped_) || changed || before_local_.any || last.any;
  const bool written_locally = touched_changed || (local_ && last.any);
  facts_.updated_locally = step_after_local_ || written_locally;
  facts_.stepped_locally = step_after_local_ || (written_locally && !all_reported_);
  const double moved = before_local_.distance + last.distance;
  facts_.moved = sample_.empty() || all_reported_ ? 0 : moved;
  facts_.sample = sample_.fingerprint();
  any_step_ = local_ = step_after_local_ = idle_step_ = rebased_ = skipped_ = false;
  before_local_ = {};
  stepped_.clear();  // even if no gradient of this rank follows
}

}  // namespace apex::parallel
