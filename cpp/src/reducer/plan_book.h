// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The current plan, and the plans of other sets of trainable parameters.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "reducer/plan.h"
#include "step/step_report.h"

namespace apex::parallel::detail {

// Note [One plan per set]
//
// A plan belongs to a set of trainable parameters. Plans are kept, so a program that alternates
// between two models has one plan for each. A rank uses the plan of its current set of trainable
// parameters. All ranks must freeze and unfreeze the same parameters. If one does not, every rank
// must detect that before messages of different sizes meet:
//
// - While there is one plan, a rank with another set leaves the plan, as with rebuild_buckets();
//   see Note [Carried through].
// - While there are several plans, every backward begins with an exchange of rows and waits for it,
//   so that differences are known before the first bucket. A plan that was not used for a while is
//   dropped, so that a program that has permanently unfrozen its model does not keep paying for
//   this.
//
// On devices on which ranks do not read each other's reports, a difference would not be detected.
// There a rank uses the plan of its own set, and drops a plan when it leaves it.

/// The plans of a reducer. Not thread safe.
class PlanBook {
 public:
  explicit PlanBook(const ReducerContext& context) : context_(context) {}

  /// The current plan; null if a plan must be recorded.
  Plan* current() { return left_ == ReasonToLeave::kNone ? in_force() : nullptr; }
  const Plan* current() const { return const_cast<PlanBook*>(this)->current(); }

  void forget();
  /// This rank leaves the plan; the other ranks may still use it.
  void leave(ReasonToLeave reason);
  /// All ranks have left the plan. With `keep` it is kept for its set. Call it with the same value
  /// on every rank.
  void left_by_all(bool keep);
  ReasonToLeave left() const { return left_; }
  /// The plan that this rank has left, if it still sends messages by it because others may use it.
  Plan* still_carried() {
    return left_ != ReasonToLeave::kNone && !several() ? in_force() : nullptr;
  }

  /// The plan by which this rank sends messages in this backward; null if there is none.
  Plan* sends_by() { return left_ == ReasonToLeave::kNone ? in_force() : still_carried(); }

  /// Whether there are several plans, so that every backward begins with an exchange of rows.
  bool several() const { return plans_.size() > 1; }
  /// Before a backward: chooses the plan of this set (by parameter), or none if there is none.
  void choose(const std::vector<bool>& trainable);
  /// The set of the current plan, by parameter, if there is one.
  std::optional<std::vector<bool>> set() const;

  /// Adds a plan without buckets and makes it current. Replaces another plan of the same set.
  Plan& put(std::vector<Place> places);
  /// A backward with the current plan has ended.
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
