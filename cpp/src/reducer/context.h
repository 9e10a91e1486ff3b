// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The state that all parts of a reducer share.

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <apex/parallel/reducer.h>

#include "comm/membership.h"
#include "reducer/parameter_table.h"
#include "reducer/phase.h"
#include "reducer/reduction.h"
#include "reducer/statistics.h"
#include "reducer/uneven_inputs.h"

namespace apex::parallel::detail {

// Note [Who may touch a reducer]
//
// One thread at a time uses a reducer. It holds the mutex while it waits for other ranks, even for
// a rank that has died, and while it runs a communication hook, which may call the reducer again on
// the same thread. So no other thread may wait for the mutex only to look at the reducer: what may
// be read at any time is atomic or constant, and the report of a stall uses try_lock().

struct ReducerContext {
  ReducerContext(std::vector<NamedTensor> tensors, std::vector<GroupPtr> groups,
                 ReducerOptions given, const void* self)
      : options(std::move(given)),
        members(std::move(groups)),
        parameters(std::move(tensors), self),
        choose(options.reduction_factory ? options.reduction_factory : choose_reduction),
        divisor(members.size) {}

  const ReducerOptions options;
  Membership members;
  ParameterTable parameters;
  const std::function<std::unique_ptr<Reduction>(const ReductionSite&)> choose;
  std::shared_ptr<CommHook> hook;
  StatisticsCounter statistics;
  int64_t backward_number = 0;  ///< from 1, of the last synchronized backward that has begun
  /// Guards the mutable members here that are not atomic, and all parts of the reducer.
  mutable std::recursive_mutex mutex;
  int64_t divisor;  ///< of the average: the number of ranks, or of ranks with data
  std::atomic<double> total_weight{0};  ///< of all ranks, with the option weighted
  UnevenInputs join;
  std::atomic<Phase> phase{Phase::kIdle};
  bool launches_at_end = false;  ///< see Note [Several reducers on one channel]
  bool parameters_changed =
      false;  ///< were frozen or unfrozen since the last synchronized backward

  /// Whether ranks read each other's reports after every backward. On a device the host then waits
  /// for the device. Under join() a rank without data needs them to follow the others.
  bool reads_reports() const {
    return !members.alone() && (members.device.is_cpu() || options.check_steps.value_or(false) ||
                                options.skip_failed_steps || options.weighted ||
                                options.replica_check_every.value_or(0) > 0 || join.active);
  }

  /// Whether a gradient that is reduced twice would be multiplied by the number of ranks.
  bool leaves_sums() const { return !options.gradient_average || options.weighted; }

  /// Describes the settings that may change between backwards and must be the same on all ranks.
  std::string describe_settings() const {
    return hook ? "the communication hook '" + hook->name() + "'"
                : std::string("no communication hook");
  }

  using Lock = std::lock_guard<std::recursive_mutex>;

  void enter(Phase next) {
    TORCH_INTERNAL_ASSERT(may_follow(phase, next), "apex reducer: phase ", static_cast<int>(next),
                          " after ", static_cast<int>(phase.load()));
    phase = next;
  }
  void fail() {
    if (phase != Phase::kFailed && phase != Phase::kReleased) enter(Phase::kFailed);
  }

  /// "rank 1: ".
  std::string me() const { return "rank " + std::to_string(members.rank) + ": "; }
};

}  // namespace apex::parallel::detail
