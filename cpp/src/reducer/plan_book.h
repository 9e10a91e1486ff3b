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
// A reducer has one plan, with a place for every parameter. For a parameter that is frozen, as for
// one without a gradient, a rank sends zeros. So no message depends on the set of trainable
// parameters, and a program that alternates between two sets has one plan for both.
//
// A gradient of a parameter that was frozen, or not used on any rank, when the plan was recorded is
// reduced on demand. The next backward then records a plan that also has the parameters of the old
// one. If parameters stay frozen for kKeptFor backwards, a plan without them is recorded. Every
// rank decides both from the same reports, so all ranks record in the same backward.
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
  /// The plan whose parameters the next one must also have; null if there is none. The same on
  /// every rank.
  const Plan* extended() const { return extended_.get(); }

  /// Before a backward with this set of trainable parameters: leaves the plan, or prepares it.
  /// @param follows  this rank has no data and does what the others do.
  void choose(const std::vector<bool>& trainable, bool follows);
  /// Replaces the plan by one without buckets.
  Plan& put(std::vector<Place> places);
  /// A backward with the current plan has ended. The arguments are the same on every rank.
  /// @param demanded  a bucket on demand was reduced.
  void served(const std::vector<bool>& trainable, bool demanded);

 private:
  enum class Next { kSame, kLarger, kSmaller };
  bool has_frozen(const std::vector<bool>& trainable) const;
  bool owns_all() const;

  const ReducerContext& context_;
  std::unique_ptr<Plan> plan_;
  ReasonToLeave left_ = ReasonToLeave::kNone;
  Next next_ = Next::kSame;  ///< the plan of the next backward
  std::unique_ptr<Plan> extended_;
  std::vector<bool> set_;  ///< of the last backward
  int64_t same_for_ = 0;   ///< number of backwards with this set before that one
};

}  // namespace apex::parallel::detail
