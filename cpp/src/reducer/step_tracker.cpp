// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/step_tracker.h"

#include <algorithm>

namespace apex::parallel {

namespace {

/// A program that never runs backward through the wrapper must not collect forwards for ever; more
/// than one skipped forward means no more than one.
constexpr size_t kMostForwards = 64;

}  // namespace

void StepTracker::forward_began() {
  if (forwards_.size() == kMostForwards) forwards_.erase(forwards_.begin() + 1);
  forwards_.push_back(std::make_shared<Forward>());
}

StepTracker::ForwardPtr StepTracker::forward_ended(bool can_be_reached) {
  if (forwards_.empty()) return nullptr;
  if (!can_be_reached) forwards_.back()->reached = true;
  return forwards_.back();
}

void StepTracker::reached_from_elsewhere() {
  for (const ForwardPtr& forward : forwards_) forward->reached = true;
}

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

void StepTracker::optimizer_stepped(int64_t optimizer, bool all) {
  all_reported_ = all_reported_ || all;
  idle_step_ = !stepped_.insert(optimizer).second || idle_step_;
  any_step_ = true;
  step_after_local_ = step_after_local_ || local_;
}

void StepTracker::backward_began(bool changed, bool touched_changed) {
  const ParameterSample::Change last = sample_.take();
  if (rebased_) changed = touched_changed = false;
  facts_.idle_step = idle_step_;
  facts_.updated = any_step_ || changed || before_local_.any || last.any;
  facts_.updated_locally = step_after_local_ || touched_changed || (local_ && last.any);
  const double moved = before_local_.distance + last.distance;
  facts_.moved = sample_.empty() || all_reported_ ? 0 : moved;
  any_step_ = local_ = step_after_local_ = idle_step_ = all_reported_ = rebased_ = false;
  before_local_ = {};
  stepped_.clear();  // also where no gradient of this rank follows
}

StepFacts StepTracker::facts() const {
  StepFacts facts = facts_;
  // While whoever hooked its outputs refers to it, backward may still come there: this one, or a
  // later one.
  facts.skipped_forward = std::any_of(
      forwards_.begin(), forwards_.end(),
      [](const ForwardPtr& forward) { return !forward->reached && forward.use_count() == 1; });
  const auto last_reached = std::find_if(forwards_.rbegin(), forwards_.rend(),
                                         [](const ForwardPtr& one) { return one->reached; });
  facts.forward_pending = std::any_of(last_reached, forwards_.rend(), [](const ForwardPtr& one) {
    return !one->reached && one.use_count() > 1;
  });
  return facts;
}

void StepTracker::backward_ended() { forwards_.clear(); }

}  // namespace apex::parallel
