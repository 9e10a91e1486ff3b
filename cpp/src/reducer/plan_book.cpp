// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/plan_book.h"

#include <algorithm>
#include <utility>

namespace apex::parallel::detail {

namespace {

/// The maximum number of plans. Another one replaces the least recently used plan.
constexpr size_t kMostSets = 4;
/// A plan is dropped after this many backwards with other plans. GANs train their critic up to a
/// hundred times per step of the generator.
constexpr int64_t kKeptFor = 128;

bool trains_same(const Plan& plan, const std::vector<bool>& trainable) {
  for (size_t i = 0; i < trainable.size(); ++i) {
    if (plan.places[i].trainable != trainable[i]) return false;
  }
  return true;
}

}  // namespace

void PlanBook::forget() {
  plans_.clear();
  in_force_.reset();
  left_ = ReasonToLeave::kNone;
}

void PlanBook::leave(ReasonToLeave reason) {
  if (plans_.empty()) return;
  if (!context_.reads_reports()) return forget();
  if (Plan* plan = current()) plan->holds_gradients = false;
  if (left_ == ReasonToLeave::kNone || left_ == ReasonToLeave::kSet) left_ = reason;
}

void PlanBook::left_by_all(bool keep) {
  if (!keep) return forget();
  left_ = ReasonToLeave::kNone;
  switch_to(std::nullopt);
}

std::optional<size_t> PlanBook::find(const std::vector<bool>& trainable) const {
  for (size_t i = 0; i < plans_.size(); ++i) {
    if (trains_same(*plans_[i], trainable)) return i;
  }
  return std::nullopt;
}

void PlanBook::switch_to(std::optional<size_t> plan) {
  if (plan == in_force_) return;
  if (Plan* before = in_force()) before->reset();
  in_force_ = plan;
  if (Plan* now = in_force()) now->holds_gradients = false;
}

void PlanBook::choose(const std::vector<bool>& trainable) {
  // A change may have been reverted. The check reads all parameters, and this function runs before
  // every backward, so the check runs only if a plan was left.
  const auto changed_back = [&] {
    return in_force_ && in_force()->kinds == context_.parameters.kinds();
  };
  if (left_ == ReasonToLeave::kSet || (left_ == ReasonToLeave::kParameters && changed_back()))
    left_ = ReasonToLeave::kNone;
  if (left_ != ReasonToLeave::kNone) return;
  const std::optional<size_t> set = find(trainable);
  if (!set && plans_.size() == 1 && context_.reads_reports()) return leave(ReasonToLeave::kSet);
  switch_to(set);
}

std::optional<std::vector<bool>> PlanBook::set() const {
  const Plan* plan = current();
  if (plan == nullptr) return std::nullopt;
  std::vector<bool> set;
  for (const Place& place : plan->places) set.push_back(place.trainable);
  return set;
}

void PlanBook::drop(size_t plan) {
  plans_.erase(plans_.begin() + static_cast<std::ptrdiff_t>(plan));
  if (in_force_ && *in_force_ > plan) --*in_force_;
}

Plan& PlanBook::put(std::vector<Place> places) {
  auto made = std::make_unique<Plan>();
  made->places = std::move(places);
  std::vector<bool> trainable;
  for (const Place& place : made->places) trainable.push_back(place.trainable);
  switch_to(std::nullopt);
  if (const auto same = find(trainable)) drop(*same);
  if (plans_.size() == kMostSets) {
    const auto oldest = std::max_element(
        plans_.begin(), plans_.end(),
        [](const auto& left, const auto& right) { return left->unused_for < right->unused_for; });
    drop(static_cast<size_t>(oldest - plans_.begin()));
  }
  plans_.push_back(std::move(made));
  in_force_ = plans_.size() - 1;
  return *plans_.back();
}

void PlanBook::served() {
  if (!in_force_) return;
  for (const auto& plan : plans_) ++plan->unused_for;
  in_force()->unused_for = 0;
  for (size_t i = plans_.size(); i-- > 0;) {
    if (plans_[i]->unused_for > kKeptFor) drop(i);
  }
}

}  // namespace apex::parallel::detail
