// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/plan_book.h"

#include <utility>

namespace apex::parallel::detail {

namespace {

/// Number of backwards. GANs train their critic up to a hundred times per step of the generator.
constexpr int64_t kKeptFor = 128;

}  // namespace

void PlanBook::forget() {
  plan_.reset();
  left_ = ReasonToLeave::kNone;
}

void PlanBook::leave(ReasonToLeave reason) {
  if (!plan_) return;
  const bool is_set = reason == ReasonToLeave::kSet || reason == ReasonToLeave::kOwner;
  if (!is_set && !context_.reads_reports()) return forget();
  plan_->holds_gradients = false;
  if (left_ == ReasonToLeave::kNone || !is_set) left_ = reason;
}

bool PlanBook::is_settled() const { return same_for_ >= kKeptFor; }

ReasonToLeave PlanBook::why_leave(const std::vector<bool>& trainable) const {
  bool has_frozen = false;
  for (size_t i = 0; i < trainable.size(); ++i) {
    const Place& place = plan_->places[i];
    if (trainable[i] && !place.trainable) return ReasonToLeave::kSet;
    // Another reducer may write its gradient in this backward.
    if (place.is_planned() && !context_.parameters.owns(context_.parameters[i]))
      return ReasonToLeave::kOwner;
    has_frozen = has_frozen || (place.is_planned() && !trainable[i]);
  }
  return has_frozen && is_settled() && trainable == set_ ? ReasonToLeave::kSet
                                                         : ReasonToLeave::kNone;
}

void PlanBook::choose(const std::vector<bool>& trainable, bool follows) {
  if (!plan_) return;
  // A change may have been reverted. The check of kinds reads all parameters, so it runs only if
  // they were the reason.
  if (left_ == ReasonToLeave::kSet || left_ == ReasonToLeave::kOwner ||
      (left_ == ReasonToLeave::kParameters && plan_->kinds == context_.parameters.kinds())) {
    left_ = ReasonToLeave::kNone;
  }
  if (left_ != ReasonToLeave::kNone) return;
  const ReasonToLeave why = follows ? ReasonToLeave::kNone : why_leave(trainable);
  if (why != ReasonToLeave::kNone) return leave(why);
  plan_->expect(trainable, context_.options.static_graph);
}

Plan& PlanBook::put(std::vector<Place> places) {
  plan_ = std::make_unique<Plan>();
  plan_->places = std::move(places);
  left_ = ReasonToLeave::kNone;
  same_for_ = 0;
  return *plan_;
}

void PlanBook::served(const std::vector<bool>& trainable) {
  same_for_ = trainable == set_ ? same_for_ + 1 : 0;
  set_ = trainable;
}

}  // namespace apex::parallel::detail
