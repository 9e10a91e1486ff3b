// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// One synchronized backward of one reducer, from its first gradient until all gradients are
/// averages.

#include <atomic>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "reducer/backward_pass.h"
#include "reducer/bucket_steps.h"
#include "reducer/context.h"
#include "reducer/plan.h"
#include "reducer/recording.h"
#include "reducer/step_clock.h"
#include "reducer/step_reporter.h"

namespace apex::parallel::detail {

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
  StepClock clock;

  std::atomic<bool> step_skipped{false};  ///< in the last synchronized backward
};

/// One synchronized backward. The phase is kRunning until send(), kEnding until complete(). If
/// a function throws, the caller must call fail(). Not thread safe.
class Backward {
 public:
  Backward(ReducerState& state, BackwardPass pass);

  const BackwardPass& pass() const { return pass_; }
  BackwardPass& pass() { return pass_; }

  // While gradients are computed.
  void gradient_ready(size_t index);
  void launch_ready();

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

  /// The error "parameter 'a' is updated inside backward ...".
  static std::string describe_early_write(const ReducerContext& context,
                                          const Parameter& parameter);

 private:
  Plan& plan() { return *book_.current(); }

  void count_down(size_t index);
  void launch(size_t index, const std::function<void()>& packed = {});
  void or_end(const std::function<void()>& launch);
  void launch_rest(StepReport report);
  void launch_absent(Plan& plan, const StepReport& report);

  void record(const std::function<void()>& meanwhile);
  void leave_behind();
  Recording recording() const;
  std::string settings() const;
  void make_plan(const Recording& mine, const Recording& agreed);

  bool misses_gradients() const;
  bool must_read() const;
  void judge(const std::function<void()>& meanwhile);
  void refuse(const StepTable& table);
  bool has_no_weight() const;
  void clear_without_weight(const std::vector<BucketMessage::Slot>& slots);
  void complete_entry(PlannedBucket& entry, size_t index, const std::function<void()>& meanwhile);
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
};

}  // namespace apex::parallel::detail
