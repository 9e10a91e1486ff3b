// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The state that all parts of a reducer share.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <apex/parallel/reducer.h>

#include "comm/collectives.h"
#include "comm/membership.h"
#include "reducer/parameter_table.h"
#include "reducer/reduction.h"

namespace apex::parallel::detail {

/// The lifecycle phase of a reducer.
enum class Phase {
  kIdle,      ///< between backwards
  kRunning,   ///< a synchronized backward is computing gradients
  kEnding,    ///< gradients are computed; it launches the remaining buckets and waits for all
  kFailed,    ///< a collective or a hook failed: the messages of the ranks no longer match
  kReleased,  ///< the process groups are gone
};

/// Whether a synchronized backward is in progress on this rank.
constexpr bool in_backward(Phase phase) {
  return phase == Phase::kRunning || phase == Phase::kEnding;
}

/// The counters and times of a reducer. Only add() and get() are thread safe.
class StatisticsCounter {
 public:
  void add(int64_t ReducerStatistics::* count, int64_t more = 1) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.*count += more;
  }

  ReducerStatistics get() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }

  void backward_began() { waited_before_ = time_waited(); }
  /// All buckets of the backward are launched.
  void all_launched() {
    if (!ended_) return;
    set(&ReducerStatistics::last_step_compute_s,
        Clock::now() - *ended_ - (time_waited() - waited_at_end_));
  }
  void backward_ended() {
    ended_ = Clock::now();
    waited_at_end_ = time_waited();
    set(&ReducerStatistics::last_backward_wait_s, waited_at_end_ - waited_before_);
  }
  /// The backward has failed, so the next step is not measured.
  void backward_failed() { ended_.reset(); }

 private:
  using Clock = std::chrono::steady_clock;

  void set(double ReducerStatistics::* time, Clock::duration value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.*time = std::chrono::duration<double>(value).count();
  }

  mutable std::mutex mutex_;  ///< guards counts_
  ReducerStatistics counts_;
  std::optional<Clock::time_point> ended_;     ///< end of the last backward
  std::chrono::nanoseconds waited_before_{0};  ///< time_waited() when the backward began
  std::chrono::nanoseconds waited_at_end_{0};  ///< time_waited() at ended_
};

// Note [Uneven inputs]
//
// Under join() a rank that has run out of data takes part in each synchronized backward of the
// others: it launches zeros for every bucket of the plan, and its report contains `without_data`.
// So it waits in the next bucket, or report, until the other ranks come. If the reports of all
// ranks contain `without_data`, the join has ended on every rank. Nothing is announced, and a
// backward under no_sync() needs nothing from the others.
//
// The reports are read before the first bucket is unpacked. So the number of ranks with data is
// known when the sum is divided, like the weights of Note [Weighted means].
//
// Only the reducer's own messages are covered. A collective of the module, such as that of a
// synchronized batch norm, would meet a bucket of the rank without data.

/// The state of join() on this rank.
struct UnevenInputs {
  bool active = false;              ///< between begin_join() and end_join()
  bool by_ranks_with_data = false;  ///< averages are over the ranks that have data
  bool throws = false;              ///< throw_on_early_termination
  bool without_data = false;        ///< this rank has run out of data
  bool followed = false;            ///< it has taken part in a backward of ranks with data
  bool over = false;                ///< no rank has data
  int64_t last = -1;    ///< when it is over: a rank that had data to the end; -1 if all had
  int64_t divisor = 0;  ///< of averages; 0: the number of ranks
};

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
        parameters(std::move(tensors), self) {}

  const ReducerOptions options;
  Membership members;
  ParameterTable parameters;
  std::shared_ptr<CommHook> hook;
  StatisticsCounter statistics;
  int64_t backward_number = 0;  ///< from 1, of the last synchronized backward that has begun
  /// Guards the mutable members here that are not atomic, and all parts of the reducer.
  mutable std::recursive_mutex mutex;
  std::atomic<double> total_weight{0};  ///< of all ranks, with the option weighted
  UnevenInputs join;
  std::atomic<Phase> phase{Phase::kIdle};
  bool shares_channel = false;  ///< see Note [Several reducers on one channel]

  /// Whether ranks read each other's reports after every backward. On a device the host then waits
  /// for the device. Under join() a rank without data needs them to follow the others.
  bool reads_reports() const {
    return !members.alone() && (members.device.is_cpu() || options.check_steps.value_or(false) ||
                                options.skip_failed_steps || options.weighted ||
                                options.replica_check_every.value_or(0) > 0 || join.active);
  }

  /// Whether a gradient that is reduced twice would be multiplied by the number of ranks.
  bool leaves_sums() const { return !options.gradient_average || options.weighted; }

  /// The factors for a sum in `dtype`. Known when the reports are read.
  Averaging averaging(const ReductionTraits& traits, at::ScalarType dtype) const {
    const int64_t divisor = join.divisor > 0 ? join.divisor : members.size;
    return averaging_of(options, traits, dtype, divisor, members.size, total_weight);
  }

  /// Describes the settings that may change between backwards and must be the same on all ranks.
  std::string describe_settings() const {
    return hook ? "the communication hook '" + hook->name() + "'"
                : std::string("no communication hook");
  }

  std::string describe_early_write(const std::string& parameter) const {
    return me() + "parameter '" + parameter +
           "' is updated inside backward (by a gradient hook), with this rank's own gradient "
           "instead of the average: step after backward";
  }

  using Lock = std::lock_guard<std::recursive_mutex>;

  void fail() {
    if (phase != Phase::kReleased) phase = Phase::kFailed;
  }

  /// "rank 1: ".
  std::string me() const { return "rank " + std::to_string(members.rank) + ": "; }
};

}  // namespace apex::parallel::detail
