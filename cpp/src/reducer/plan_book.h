// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The plan in force, and those that were in force for other sets of trainable parameters.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "reducer/plan.h"
#include "reducer/recurrence.h"

namespace apex::parallel::detail {

// Note [Sets that come again]
//
// A program that trains two models in turn freezes and unfreezes the same parameters again and
// again. Each set of trainable parameters has its plan, and plans are kept. Which one a backward
// takes has to be known before its first message, on all ranks, while a rank knows only what it has
// frozen itself. But all ranks know which sets were agreed on so far, and in which order: so all
// expect the same set, the one that came at this place of the last period, and take its plan. Where
// a rank finds something else frozen, it asks for a new plan, as Note [Parameters that are frozen
// or unfrozen] has it.

/// Not thread safe.
class PlanBook {
 public:
  /// The plan in force; null where one is to be recorded.
  Plan* current() { return in_force_ ? plans_[*in_force_].get() : nullptr; }
  const Plan* current() const { return in_force_ ? plans_[*in_force_].get() : nullptr; }

  void forget();
  /// Takes the plan in force out, and forgets the others.
  Plan leave();

  /// Before a backward, on all ranks alike: takes the plan of the set that is expected next.
  void take_expected();
  /// Before a backward, where ranks hear nothing of each other: takes the plan of what is trainable
  /// here, which has to be the same on all; none if there is none.
  void take_for(const std::vector<bool>& trainable_here);
  /// A backward with the plan in force has ended.
  void came();

  /// After an agreement: takes the kept plan of the set that is trainable anywhere, if it holds all
  /// of `ready`, and returns true; else makes the plan in force a new one with these places and no
  /// buckets. The same on every rank.
  bool take_agreed(const std::vector<Place>& agreed, const std::vector<int64_t>& ready);

  /// Whether the last agreement had a parameter that was frozen with a local gradient: its plan
  /// serves once.
  bool serves_once = false;

 private:
  std::optional<size_t> find(bool Place::* field, const std::vector<bool>& values) const;
  void switch_to(std::optional<size_t> set);

  std::vector<std::unique_ptr<Plan>> plans_;  ///< by set
  std::optional<size_t> in_force_;
  Recurrence recurrence_;
};

}  // namespace apex::parallel::detail
