// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// One synchronized backward of one reducer, from its first gradient until all gradients are
/// averages.

#include <atomic>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "reducer/backward_session.h"
#include "reducer/plan.h"
#include "reducer/step_reporter.h"

namespace apex::parallel::detail {

// Note [Order of launches]
//
// Collectives of one process group must be issued in the same order on every rank, but the order in
// which gradients become ready may differ. So a bucket is launched only after all buckets before it
// in the plan. Only the thread with the right to change the reducer launches buckets. The report
// follows the last bucket, and later collectives of a reduction follow the report.

// Note [Carried through]
//
// Ranks in a synchronized backward wait for each other's buckets. A rank that skipped its buckets
// would send those of its next backward, of other sizes, to ranks that still wait for these. So
// every rank carries a backward through once it has begun. A rank without gradients sends zeros,
// and its report gives the reason:
//
// - It failed: an exception ended its backward, in the module or in a hook. Then this backward is
//   invalid. Every rank throws, and all can continue with the next backward.
// - It left the plan (rebuild_buckets(), another communication hook). If all ranks have left it,
//   they make a new plan and reduce their gradients by that plan. If some have kept it, every rank
//   throws.
//
// If a rank fails after its report, it is unknown what the others have received. Then the reducer
// enters Phase::kFailed.

// Note [Skipped steps]
//
// skip_step() is a field of the report. The backward is carried through as always. When the reports
// are read, every rank drops the gradients and sets them to None, so that an optimizer steps
// nothing even if the training loop does not check step_skipped. This is the only way to undo sums
// that contain this step's gradients. Gradients that accumulated before under no_sync() belong to
// the same step, and are dropped as well. With skip_failed_steps a failed backward ends in the same
// way.

/// The state that a reducer keeps from one backward to the next.
struct ReducerState {
  ReducerState(std::vector<NamedTensor> parameters, std::vector<GroupPtr> groups,
               ReducerOptions options, const void* self)
      : context(std::move(parameters), std::move(groups), std::move(options), self),
        book(context),
        reporter(context) {}

  ReducerContext context;  ///< its mutex guards all members below
  PlanBook book;
  StepReporter reporter;
  std::atomic<bool> step_skipped{false};  ///< in the last synchronized backward
};

/// One synchronized backward. The phase is kRunning until send(), then kEnding. If a function
/// throws before the collectives are over, the caller must call fail(). Not thread safe.
class Backward {
 public:
  Backward(ReducerState& state, BackwardPass pass, const BackwardSession& session);

  BackwardPass& pass() { return pass_; }

  // While gradients are computed.
  void gradient_ready(size_t index);
  /// This rank has no data under join(): launches zeros for all buckets, except one that carries
  /// the report.
  void launch_without_data();

  // When all gradients are computed.
  void send();
  void complete(const std::function<void()>& meanwhile);
  /// Call it when complete() has returned. Throws the error of this backward, if there is one. The
  /// backward is over then.
  void conclude();

  /// Ends a backward after an exception. Sends what the other ranks wait for, and leaves nothing in
  /// flight. Call it in a catch block, or when autograd has abandoned the backward.
  void fail() noexcept;

  /// While gradients are computed: names the gradients that the next bucket waits for.
  std::string describe() const;

 private:
  Plan& plan() { return *book_.current(); }

  void count_down(size_t index);
  void launch_ready();
  void launch(size_t index, const std::function<void()>& packed = {});
  void or_end(const std::function<void()>& launch);
  void launch_rest(StepReport report);
  void launch_absent(Plan& plan, const StepReport& report);
  void add_findings(StepReport& report);

  void record(const std::function<void()>& meanwhile);
  void leave_behind();

  bool misses_gradients() const;
  bool must_read() const;
  void judge(const std::function<void()>& meanwhile);
  void refuse(const StepTable& table);
  void complete_entry(PlannedBucket& entry, const std::function<void()>& meanwhile);
  void reduce_on_demand(const std::function<void()>& meanwhile);
  void reduce_sparse();
  void compare_replicas(const StepTable& table);

  void send_failure() noexcept;
  void drop_messages() noexcept;
  void call_off();
  void remember_reduced();

  ReducerState& state_;
  ReducerContext& context_;
  PlanBook& book_;
  StepReporter& reporter_;
  BackwardPass pass_;
  const BackwardSession& session_;
};

}  // namespace apex::parallel::detail
