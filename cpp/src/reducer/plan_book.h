// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The plan of a reducer, and why a rank has left it.

#include <cstdint>
#include <memory>
#include <vector>

#include "reducer/plan.h"
#include "step/step_report.h"

namespace apex::parallel::detail {

// Note [One plan]
//
// A reducer has one plan. A parameter that is frozen later keeps its place in its bucket, for which
// its rank sends zeros, as for a parameter without a gradient. So no message depends on the set of
// trainable parameters, and a program that alternates between two sets has one plan for both.
//
// If a parameter becomes trainable that was frozen when the plan was recorded, the rank leaves the
// plan, as with rebuild_buckets(); see Note [Carried through]. The new plan also has the parameters
// of the old one. Parameters that stay frozen for kKeptFor backwards leave the plan in the same
// way.
//
// All ranks must freeze and unfreeze the same parameters. The reports contain the set of each rank,
// so a difference is an error on every rank. On devices on which ranks do not read each other's
// reports, a difference is not detected.

/// The plan of a reducer. Not thread safe.
class PlanBook {
 public:
  explicit PlanBook(const ReducerContext& context) : context_(context) {}

  /// The current plan; null if a plan must be recorded.
  Plan* current() { return left_ == ReasonToLeave::kNone ? plan_.get() : nullptr; }
  const Plan* current() const { return const_cast<PlanBook*>(this)->current(); }

  void forget();
  /// This rank leaves the plan; the other ranks may still use it.
  void leave(ReasonToLeave reason);
  ReasonToLeave left() const { return left_; }
  /// The plan that this rank has left, if it still sends messages by it because others may use it.
  Plan* still_carried() {
    return left_ != ReasonToLeave::kNone && context_.reads_reports() ? plan_.get() : nullptr;
  }
  /// The plan by which this rank sends messages in this backward; null if there is none.
  Plan* sends_by() { return left_ == ReasonToLeave::kNone ? plan_.get() : still_carried(); }
  /// The plan whose parameters the next one must also have, if all ranks left it because of the set
  /// of trainable parameters. The same on every rank.
  const Plan* extended() const { return is_settled() ? nullptr : plan_.get(); }

  /// Before a backward with this set of trainable parameters: leaves the plan, or prepares it.
  /// @param follows  this rank has no data and does what the others do.
  void choose(const std::vector<bool>& trainable, bool follows);
  /// Replaces the plan by one without buckets.
  Plan& put(std::vector<Place> places);
  /// A backward with the current plan has ended. The set is the same on every rank.
  void served(const std::vector<bool>& trainable);

 private:
  ReasonToLeave why_leave(const std::vector<bool>& trainable) const;
  bool is_settled() const;

  const ReducerContext& context_;
  std::unique_ptr<Plan> plan_;
  ReasonToLeave left_ = ReasonToLeave::kNone;
  std::vector<bool> set_;  ///< of the last backward
  int64_t same_for_ = 0;   ///< number of backwards with this set before that one
};

}  // namespace apex::parallel::detail
