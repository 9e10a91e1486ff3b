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
  extended_.reset();
  left_ = ReasonToLeave::kNone;
  next_ = Next::kSame;
}

void PlanBook::leave(ReasonToLeave reason) {
  if (!plan_) return;
  if (reason != ReasonToLeave::kOwner && !context_.reads_reports()) return forget();
  plan_->holds_gradients = false;
  if (left_ == ReasonToLeave::kNone || reason != ReasonToLeave::kOwner) left_ = reason;
}

bool PlanBook::has_frozen(const std::vector<bool>& trainable) const {
  for (size_t i = 0; i < trainable.size(); ++i) {
    if (plan_->places[i].is_planned() && !trainable[i]) return true;
  }
  return false;
}

/// Another reducer may write the gradient of a parameter that this one does not own.
bool PlanBook::owns_all() const {
  for (size_t i = 0; i < plan_->places.size(); ++i) {
    if (plan_->places[i].is_planned() && !context_.parameters.owns(context_.parameters[i]))
      return false;
  }
  return true;
}

void PlanBook::choose(const std::vector<bool>& trainable, bool follows) {
  if (!plan_) return;
  if (const Next next = std::exchange(next_, Next::kSame); next != Next::kSame) {
    extended_ = std::move(plan_);
    if (next == Next::kSmaller) extended_.reset();
    return;
  }
  // A change may have been reverted. The check of kinds reads all parameters, so it runs only if
  // they were the reason.
  if (left_ == ReasonToLeave::kOwner ||
      (left_ == ReasonToLeave::kParameters && plan_->kinds == context_.parameters.kinds())) {
    left_ = ReasonToLeave::kNone;
  }
  if (left_ != ReasonToLeave::kNone) return;
  if (!follows && !owns_all()) return leave(ReasonToLeave::kOwner);
  plan_->expect(trainable, context_.options.static_graph);
}

Plan& PlanBook::put(std::vector<Place> places) {
  plan_ = std::make_unique<Plan>();
  plan_->places = std::move(places);
  extended_.reset();
  left_ = ReasonToLeave::kNone;
  next_ = Next::kSame;
  same_for_ = 0;
  return *plan_;
}

void PlanBook::served(const std::vector<bool>& trainable, bool demanded) {
  same_for_ = trainable == set_ ? same_for_ + 1 : 0;
  set_ = trainable;
  if (!plan_ || left_ != ReasonToLeave::kNone) return;
  if (demanded) {
    next_ = Next::kLarger;
  } else if (same_for_ >= kKeptFor && has_frozen(trainable)) {
    next_ = Next::kSmaller;
  }
}

}  // namespace apex::parallel::detail
