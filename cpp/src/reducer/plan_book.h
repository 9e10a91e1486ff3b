// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The plan in force, and those of other sets of trainable parameters.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "reducer/plan.h"
#include "step/step_report.h"

namespace apex::parallel::detail {

// Note [One plan per set]
//
// A plan belongs to a set of trainable parameters, and plans are kept: a program that trains two
// models in turn has one for each. A rank takes the plan of the set that is trainable on it. Ranks
// have to freeze and unfreeze alike, and if one does not, every rank has to know before messages of
// different sizes meet:
//
// - While there is one plan, a rank with another set has no use for it, and leaves it as by
//   relearn(): see Note [Carried through].
// - While there are several, every backward begins with a row of each rank, for which it waits:
//   who differs is known before the first bucket. A plan that has not served for a while is
//   forgotten, so that a program that has unfrozen its model for good does not go on like this.
//
// On devices where ranks do not read each other's reports nobody would hear of it: there a rank
// takes its own set's plan, and forgets one that it leaves.

/// Not thread safe.
class PlanBook {
 public:
  explicit PlanBook(const ReducerContext& context) : context_(context) {}

  /// The plan in force; null where one is to be recorded.
  Plan* current() { return left_ == ReasonToLeave::kNone ? in_force() : nullptr; }
  const Plan* current() const { return const_cast<PlanBook*>(this)->current(); }

  void forget();
  /// This rank has no use for the plan any more; the others may.
  void leave(ReasonToLeave reason);
  /// All ranks have left it. `keep`: for the set that it belongs to; the same on every rank.
  void left_by_all(bool keep);
  ReasonToLeave left() const { return left_; }
  /// The plan that was left, if messages are sent by it until all ranks have left it.
  Plan* still_carried() {
    return left_ != ReasonToLeave::kNone && !several() ? in_force() : nullptr;
  }

  /// The plan by which this rank sends in this backward; null if there is none.
  Plan* sends_by() { return left_ == ReasonToLeave::kNone ? in_force() : still_carried(); }

  /// Whether every backward begins with a row of each rank.
  bool several() const { return plans_.size() > 1; }
  /// Before a backward: takes the plan of this set, by parameter; none if there is none.
  void choose(const std::vector<bool>& trainable);
  /// By parameter; the set of the plan in force, if there is one.
  std::optional<std::vector<bool>> set() const;

  /// Makes a plan without buckets the one in force; another of the same set is replaced.
  Plan& put(std::vector<Place> places);
  /// A backward with the plan in force has ended.
  void served();

 private:
  Plan* in_force() { return in_force_ ? plans_[*in_force_].get() : nullptr; }
  std::optional<size_t> find(const std::vector<bool>& trainable) const;
  void switch_to(std::optional<size_t> plan);
  void drop(size_t plan);

  const ReducerContext& context_;
  std::vector<std::unique_ptr<Plan>> plans_;
  std::optional<size_t> in_force_;
  ReasonToLeave left_ = ReasonToLeave::kNone;
};

}  // namespace apex::parallel::detail
