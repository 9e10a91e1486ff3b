// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// One synchronized backward of one reducer, from its first gradient until all are averages.

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "reducer/backward_pass.h"
#include "reducer/bucket_steps.h"
#include "reducer/context.h"
#include "reducer/plan_book.h"
#include "reducer/recording.h"
#include "reducer/step_reporter.h"

namespace apex::parallel::detail {

class OverlapRecorder;

/// What a reducer keeps from one backward to the next.
struct ReducerState {
  ReducerState(std::vector<NamedTensor> parameters, std::vector<GroupPtr> groups,
               ReducerOptions options, const void* self)
      : context(std::move(parameters), std::move(groups), std::move(options), self),
        book(context),
        reporter(context) {}

  ReducerContext context;  ///< its monitor guards all below
  PlanBook book;
  StepReporter reporter;
  /// Of a backward that was left: the parameters that were not waited for since.
  std::vector<int64_t> in_flight() const;

  BucketPlan preset;          ///< used instead of one made from sizes, where it fits
  bool step_skipped = false;  ///< in the last synchronized backward
  std::shared_ptr<OverlapRecorder> recorder;  ///< only while times are taken
};

/// The phases are kRunning until send(), kEnding from there to complete() or to leave(), then
/// kDeferred. Whoever calls catches what is thrown and calls fail(). Not thread safe.
class Backward {
 public:
  Backward(ReducerState& state, BackwardPass pass);

  const BackwardPass& pass() const { return pass_; }
  BackwardPass& pass() { return pass_; }

  // Gradients are computed.
  void gradient_ready(size_t index, const at::Tensor& incoming);
  void launch_ready(const at::Tensor& incoming);
  /// No bucket is left to be launched by a plan before send().
  bool launched_all() const;

  // They are.
  /// Only the gradients: send() follows, or send_absent() and fail() where this has thrown.
  void send_gradients();
  void send();
  bool may_leave() const;
  void leave();
  void complete(const std::function<void()>& meanwhile);
  /// Hands the gradients of this bucket out, and calls back. Of a backward that was left.
  void complete_entry(size_t index, const std::function<void()>& meanwhile);
  /// What is left to do when complete() has returned. Throws what this backward has to throw; it is
  /// over then.
  void conclude();

  /// Something was thrown: the other ranks get what they wait for, and nothing stays in flight.
  /// Call in a catch block, or where autograd has given up.
  void fail() noexcept;
  /// Of that only what the others wait for: fail() follows.
  void send_absent() noexcept;

  /// While gradients are computed: which of them the next bucket waits for.
  std::string describe() const;

  /// "parameter 'a' is updated inside backward ...".
  static std::string describe_early_write(const ReducerContext& context,
                                          const Parameter& parameter);
  static std::string describe_overtaken(const Parameter& parameter);

 private:
  Plan& plan() { return *book_.current(); }

  void count_down(size_t index, const at::Tensor& incoming);
  void launch(size_t index, const at::Tensor& incoming, const std::function<void()>& packed = {});
  void see_what_has_arrived();
  void launch_buckets(size_t end, const std::function<void()>& packed);
  void launch_rest(StepReport report);
  void launch_absent(Plan& plan, size_t end, const StepReport& report);

  void record(const std::function<void()>& meanwhile);
  void leave_behind(bool keep);
  Recording recording() const;
  std::string settings() const;
  void make_plan(const Recording& mine, const Recording& agreed,
                 const std::vector<bool>& trainable);

  bool must_read() const;
  void judge(const std::function<void()>& meanwhile);
  void refuse(const StepTable& table);
  void clear_without_weight(const std::vector<BucketMessage::Slot>& slots);
  void complete_entries(const std::function<void()>& meanwhile);
  void call_back(int64_t bucket, const std::vector<BucketMessage::Slot>& slots, bool all_used);
  void settle();
  void reduce_late(const std::vector<int64_t>& late);
  void find_non_finite_sum(const std::vector<BucketMessage::Slot>& slots);
  void compare_replicas(const StepTable& table);
  void order_by_need();

  void look_at_hooks();
  bool hooks_failed_together() const;
  void send_failure() noexcept;
  void drop_messages() noexcept;
  void call_off();
  void remember_reduced();
  void sample_parameters();

  ReducerState& state_;
  ReducerContext& context_;
  PlanBook& book_;
  StepReporter& reporter_;
  BackwardPass pass_;
};

}  // namespace apex::parallel::detail
