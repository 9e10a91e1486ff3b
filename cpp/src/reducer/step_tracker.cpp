// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/step_tracker.h"

namespace apex::parallel {

void StepTracker::gradient_arrived(bool synchronized) {
  stepped_.clear();
  if (!synchronized) local_ = true;
}

void StepTracker::optimizer_stepped(int64_t optimizer) {
  idle_step_ = !stepped_.insert(optimizer).second || idle_step_;
  any_step_ = true;
  step_after_local_ = step_after_local_ || local_;
}

void StepTracker::backward_began(bool changed, bool touched_changed) {
  facts_.idle_step = idle_step_;
  facts_.updated = (any_step_ && !skipped_) || changed;
  facts_.updated_locally = step_after_local_ || touched_changed;
  any_step_ = local_ = step_after_local_ = idle_step_ = skipped_ = false;
  stepped_.clear();  // also where no gradient of this rank follows
}

}  // namespace apex::parallel
