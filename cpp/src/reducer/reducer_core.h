// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The inside of Reducer: what autograd calls, what its user calls between backwards, and how the
/// parts work together. See docs/design.md for a map. reducer_core.cpp is what happens between
/// backwards, reducer_core_backward.cpp a backward up to its last gradient, reducer_core_end.cpp
/// the rest of it, reducer_core_failure.cpp what ranks owe each other when one of them fails.

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <apex/parallel/reducer.h>

#include "reducer/backward_pass.h"
#include "reducer/bucket_steps.h"
#include "reducer/companions.h"
#include "reducer/context.h"
#include "reducer/overlap_recorder.h"
#include "reducer/phase.h"
#include "reducer/plan_agreement.h"
#include "reducer/plan_book.h"
#include "reducer/step_agreement.h"
#include "reducer/watched_outputs.h"

namespace apex::parallel::detail {

class BackwardScope;

/// Thread safe, see Note [Who may touch a reducer]. What is documented at Reducer is not repeated
/// here.
class ReducerCore : public std::enable_shared_from_this<ReducerCore> {
 public:
  ReducerCore(std::vector<NamedTensor> parameters, std::vector<GroupPtr> groups,
              ReducerOptions options);
  ~ReducerCore();
  /// Compares models, connects, broadcasts, and hooks the parameters. Collective.
  void begin();
  void retire() { context_.parameters.retire(); }

  // What the user calls.
  void prepare_for_forward();
  void watch_outputs(const std::vector<at::Tensor>& outputs);
  void set_synchronizing(bool on) { synchronizing_.store(on); }
  bool synchronizing() const { return synchronizing_.load(); }
  void set_bucket_callback(std::function<void(const ReducedBucket&)> callback);
  void set_deferred(bool on);
  bool deferred() const;
  void set_comm_hook(std::shared_ptr<CommHook> hook);
  void set_plan(const BucketPlan& plan);
  void record_overlap(bool on);
  void relearn();
  void release();
  void wait();
  void wait_for(const std::vector<int64_t>& parameters);
  std::vector<int64_t> in_flight() const;
  std::optional<BucketPlan> plan() const;
  std::vector<at::Tensor> buffers();
  std::optional<OverlapReport> overlap_report() const;
  GroupPtr communicator() const;
  const std::vector<NamedTensor>& parameters() const { return context_.parameters.named(); }
  ReducerStatistics statistics() const { return context_.statistics.get(); }
  /// `all`: see StepTracker.
  void optimizer_stepped(int64_t optimizer, bool all);
  void refuse_step_in_backward(const at::Tensor& parameter) const;
  void skip_step();
  bool step_skipped() const;

  // Uneven inputs.
  void begin_join(bool divide_by_initial_world_size);
  void end_join();
  JoinEvent join_event(bool active, JoinEvent::Kind kind, int64_t argument);
  void follow();
  void shadow_backward_begin(int64_t argument);
  void shadow_backward_end();
  int64_t last_with_data(bool followed, int64_t states) const;

  // What autograd calls. By the registry: an output of this reducer lies in the graph of `task`.
  void output_reached(int task);
  bool has_entered(int task) const;
  void own_parameters();
  void accompany(const std::vector<std::shared_ptr<ReducerCore>>& in_graph);
  bool has_outputs_in(const std::unordered_set<torch::autograd::Node*>& nodes) {
    return outputs_.lie_in(nodes);
  }
  /// By the hook of a parameter: its gradient was accumulated; `incoming` is what autograd has
  /// added.
  void gradient_ready(size_t index, const at::Tensor& incoming);
  /// By the scope of a backward: it has ended, or failed.
  void finish(BackwardScope* scope);
  void abandon(BackwardScope* scope) noexcept;

  // What companions call.
  void compare_early();
  std::string out_of_step() const;
  void give_up_soon();

 private:
  using Change = Monitor::Change;
  using Read = Monitor::Read;

  // Between backwards.
  void hook_parameters();
  void follow_change();
  void refresh(ReasonToLeave reason);
  void leave_plan(ReasonToLeave reason);
  void refuse_in_backward(const char* what) const;
  void complete_deferred();
  std::vector<int64_t> parameters_in_flight() const;
  void adopt(const BucketPlan& plan);
  void enter(Phase phase);
  void fail();
  std::string describe_settings() const;

  // A backward begins, and computes gradients.
  void choose_plan();
  void begin_backward();
  BackwardPass prepare_pass();
  void begin_scope(const std::shared_ptr<BackwardScope>& scope, BackwardPass pass);
  bool begin_at_gradient(size_t index, const at::Tensor& incoming);
  void overtake_deferred();
  void announce_local_backward();
  void gradient_of_local_backward(Parameter& parameter, bool overtaken);
  void count_down(size_t index, const at::Tensor& incoming);
  void launch(size_t index, const at::Tensor& incoming = {});
  void launch_ready(const at::Tensor& incoming);
  StepFacts step_facts(bool left_plan) {
    return step_.facts(pass_->wants_rebuild, left_plan, wants_skip_);
  }
  std::string describe_early_write(const Parameter& parameter) const;

  // It ends.
  void end_backward();
  void announce_end();
  void agree_on_plan();
  Recording recording(const StepFacts& facts) const;
  void launch_rest();
  void call_off();
  void call_off_failed();
  bool may_defer() const;
  size_t done_in_order() const;
  void order_by_need(size_t done);
  void complete(size_t done = 0);
  void complete_entry(size_t index);
  std::vector<size_t> complete_entries();
  void call_back(int64_t bucket, const std::vector<BucketMessage::Slot>& slots, bool all_used);
  void settle();
  void reduce_late_and_call_back(const std::vector<int64_t>& late);
  void find_non_finite_sum(const std::vector<BucketMessage::Slot>& slots);
  void rebuild_now();
  void agree_on_what_follows(const SeenFacts& seen, size_t done);
  void compare_steps(const SeenFacts& seen);
  SeenFacts await_facts(std::vector<PlannedBucket>& entries);
  void carry_left_plan();
  void remember_reduced();
  void sample_parameters();
  void end_pass();
  void close_book();

  // It fails.
  void or_drop(const std::function<void()>& body);
  void drop_messages() noexcept;
  bool part_is_done() const;
  void or_skip(const std::function<void()>& body);
  void send_failure() noexcept;
  void launch_left(const StepFacts& facts);
  bool follow_the_others() noexcept;
  void awaiting(const std::function<void(const std::function<void()>& meanwhile)>& body);
  std::vector<bool> trainable_anywhere() const;

  mutable ReducerContext context_;  ///< its monitor guards all below, but what guards itself
  std::atomic<bool> synchronizing_{true};
  WatchedOutputs outputs_;  ///< guards itself
  Phase phase_ = Phase::kIdle;
  PlanBook book_;
  StepAgreement step_;
  BackwardScope* scope_ = nullptr;    ///< of the backward in progress
  std::optional<BackwardPass> pass_;  ///< of the backward in progress, or deferred
  std::shared_ptr<BackwardScope> shadow_;
  Companions companions_;
  int entered_task_ = -1;           ///< the graph task that came to this reducer last
  bool wants_rebuild_ = false;      ///< the next pass does
  bool wants_skip_ = false;         ///< skip_step() was called for this backward, or the next one
  bool step_skipped_ = false;       ///< in the last synchronized backward
  std::vector<uint8_t> overtaken_;  ///< by parameter: used before its update
  bool forward_since_ = false;      ///< since backward returned with buckets in flight
  std::vector<PlannedBucket>
      left_;           ///< the plan that was left, until the other ranks have left it, too
  BucketPlan preset_;  ///< used instead of one made from sizes, where it fits
  bool divide_by_initial_ = true;  ///< under join()
  bool announces_ends_ = false;    ///< of backwards, under join()
  std::function<void(const ReducedBucket&)> callback_;
  std::unique_ptr<OverlapRecorder> recorder_;  ///< only while times are taken
};

/// Lives exactly as long as the autograd engine may still call back for one backward: the engine
/// holds it in a final callback, and drops it unrun when the backward fails. See
/// Note [The end of a backward] in reducer_core_backward.cpp.
class BackwardScope {
 public:
  explicit BackwardScope(std::shared_ptr<ReducerCore> core) : core_(std::move(core)) {}
  BackwardScope(const BackwardScope&) = delete;
  BackwardScope& operator=(const BackwardScope&) = delete;
  ~BackwardScope() {
    if (!ended_) core_->abandon(this);
  }
  void end() {
    ended_ = true;
    core_->finish(this);
  }
  void dismiss() { ended_ = true; }

 private:
  std::shared_ptr<ReducerCore> core_;
  bool ended_ = false;
};

}  // namespace apex::parallel::detail
