// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/plan_book.h"

#include <algorithm>
#include <utility>

namespace apex::parallel::detail {

namespace {

/// For how many sets plans are kept; one more, and all are forgotten.
constexpr size_t kMostSets = 4;

}  // namespace

void PlanBook::forget() {
  plans_.clear();
  in_force_.reset();
  recurrence_.forget();
  serves_once = false;
}

Plan PlanBook::leave() {
  Plan left;
  if (Plan* plan = current()) left = std::move(*plan);
  forget();
  return left;
}

void PlanBook::switch_to(std::optional<size_t> set) {
  if (set == in_force_) return;
  if (Plan* plan = current()) plan->reset();
  in_force_ = set;
  if (Plan* plan = current()) plan->holds_gradients = false;
}

void PlanBook::take_expected() {
  const Plan* plan = current();
  if (plan == nullptr || !plan->carries_facts()) return;
  if (const auto next = recurrence_.next()) switch_to(next);
}

void PlanBook::take_for(const std::vector<bool>& trainable_here) {
  switch_to(find(&Place::trainable_here, trainable_here));
}

void PlanBook::came() {
  if (in_force_) recurrence_.came(*in_force_);
}

/// The set for which `field` has these values.
std::optional<size_t> PlanBook::find(bool Place::* field, const std::vector<bool>& values) const {
  for (size_t set = 0; set < plans_.size(); ++set) {
    const std::vector<Place>& places = plans_[set]->places;
    bool same = true;
    for (size_t i = 0; i < places.size() && same; ++i) same = places[i].*field == values[i];
    if (same) return set;
  }
  return std::nullopt;
}

bool PlanBook::take_agreed(const std::vector<Place>& agreed, const std::vector<int64_t>& ready) {
  std::vector<bool> anywhere;
  for (const Place& place : agreed) anywhere.push_back(place.trainable_anywhere);
  std::optional<size_t> set = find(&Place::trainable_anywhere, anywhere);
  if (set && set != in_force_ && !serves_once) {
    std::vector<Place>& kept = plans_[*set]->places;
    const bool fits = std::all_of(ready.begin(), ready.end(), [&](int64_t i) {
      return kept[i].bucket >= 0 && kept[i].sparse_dim == agreed[i].sparse_dim &&
             kept[i].in_parts == agreed[i].in_parts;
    });
    if (fits) {
      switch_to(set);
      for (size_t i = 0; i < agreed.size(); ++i) kept[i].trainable_here = agreed[i].trainable_here;
      return true;
    }
  }
  if (!set && plans_.size() == kMostSets) {
    const bool once = serves_once;
    forget();
    serves_once = once;
  }
  if (!set) {
    set = plans_.size();
    plans_.push_back(nullptr);
  }
  switch_to(set);
  plans_[*set] = std::make_unique<Plan>();
  plans_[*set]->places = agreed;
  return false;
}

}  // namespace apex::parallel::detail
