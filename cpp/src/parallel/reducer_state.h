#pragma once

/// The inside of Reducer. Split by phase: reducer.cpp (construction, hooks, public functions),
/// reducer_plan.cpp (learning and building the buckets), reducer_backward.cpp (one backward),
/// reducer_finish.cpp (its end), reducer_carry.cpp (a backward that a rank cannot run as the others expect),
/// reducer_defer.cpp (an end that does not wait), reducer_join.cpp (uneven inputs), reducer_overlap.cpp
/// (taking times).

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <apex/error.h>
#include <apex/parallel/bucket.h>
#include <apex/parallel/reducer.h>

#include "parallel/bucket_tuner.h"
#include "parallel/overlap_recorder.h"
#include "reducer/parameter_owner.h"
#include "reducer/recurrence.h"
#include "reducer/step_facts.h"
#include "reducer/step_tracker.h"
#include "torch_version.h"

namespace apex::parallel::detail {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

using AccumulatorPtr = NodePtr;

class BackwardScope;

/// A range in torch's profiler (and in NVTX under emit_nvtx). Costs a few nanoseconds without one.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name) : function_(at::RecordScope::USER_SCOPE) {
    if (function_.isActive()) function_.before(name);
  }

 private:
  at::RecordFunction function_;
};

class ReducerState : public std::enable_shared_from_this<ReducerState> {
 public:
  ReducerState(std::vector<NamedTensor> parameters, std::vector<GroupPtr> groups,
               ReducerOptions options);
  ~ReducerState();

  // reducer.cpp
  void synchronize_model();
  void separate_groups();
  void own_parameters();
  void hook_parameters();
  void unhook_parameters();
  bool parameters_changed() const;
  void follow_change();
  void refresh(ReasonToLeave reason);
  void retire();
  void release();

  // reducer_backward.cpp: called by autograd
  void output_reached(int task);
  void gradient_ready(size_t index, const at::Tensor& incoming);

  // by registry.h, which calls output_reached() for all reducers of a backward
  bool has_entered(int task) const;
  void accompany(const std::vector<std::shared_ptr<ReducerState>>& in_graph);
  bool reach_outputs_in(const std::unordered_set<torch::autograd::Node*>& nodes);

  /// An output that backward may come through; it lives as long as its hook.
  struct Output {
    torch::autograd::Node* node;
    StepTracker::ForwardPtr forward;
  };
  void watch(const std::shared_ptr<const Output>& output);

  // reducer_finish.cpp: called by the scope of a backward
  void finish(BackwardScope* scope);
  void abandon(BackwardScope* scope) noexcept;

  // reducer_defer.cpp
  void wait_for(const std::vector<int64_t>& parameters);
  void complete_deferred();
  std::vector<int64_t> parameters_in_flight() const;

  // reducer_tune.cpp
  void preset_plan(const BucketPlan& plan);

  // reducer_join.cpp
  JoinEvent exchange_event(bool active, JoinEvent::Kind kind, int64_t argument);
  void shadow_backward_begin(bool kept);
  void shadow_backward_end();
  int64_t last_with_data(bool followed, int64_t scalers) const;

  // reducer_overlap.cpp
  std::optional<OverlapReport> overlap_report() const;

  // reducer_plan.cpp
  void learn();
  void build_buckets();
  void forget_plan();
  void leave_plan(ReasonToLeave reason);

  /// Where a parameter stands in a plan, and what it was when the plan was agreed on.
  struct Place {
    int64_t bucket = -1;      ///< index into the plan's entries, -1: in none
    size_t slot = 0;          ///< its place in that bucket
    int32_t expected = 1;     ///< times it fires per backward, as this rank has recorded
    bool sparse = false;      ///< its gradient has sparse layout
    int64_t sparse_dim = 0;   ///< and over how many of its dimensions
    bool trainable_here = false;
    bool trainable_anywhere = false;  ///< on some rank
  };

  struct Parameter : Place {
    std::string name;
    at::Tensor variable;
    // What the hooks were made for; another value means that they have to be made anew.
    bool trainable = false;
    at::ScalarType dtype = at::kFloat;
    at::Device device = at::Device(at::kCPU);
    std::vector<int64_t> strides;
    AccumulatorPtr accumulator;
    uintptr_t hook = 0;
    /// Of several reducers that know it; see Note [One parameter, one reducer].
    std::shared_ptr<ParameterOwner> owner;

    int32_t fired = 0;        ///< times it fired in this backward
    int64_t last_fired = 0;   ///< when, in steps of the learning backward
    bool touched = false;     ///< got a gradient since the last synchronized backward
    uint32_t touched_version = 0;  ///< of the parameter, when it got the last of these
    uint32_t seen_version = 0;  ///< of the parameter, when the last synchronized backward began

    // Without averaging, and under join(): the gradient as the last synchronized backward left it.
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> reduced{
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    uint32_t reduced_version = 0;
    bool stale = false;  ///< it is there still, and this backward adds to it
    bool overtaken = false;  ///< this backward began before its last gradient was awaited
  };

  /// A bucket and its message in flight.
  struct Entry {
    Bucket bucket;
    int64_t members = 0;  ///< parameters that have to fire before it is launched
    int64_t pending = 0;  ///< of these, how many have not
    bool launched = false;
    bool completed = false;  ///< awaited and unpacked, and its callback was called
    bool average_on_wire = false;
    bool bypasses_hook = false;  ///< all-reduced although there is a communication hook
    c10::intrusive_ptr<c10d::Work> work;
    c10::intrusive_ptr<c10::ivalue::Future> future;  ///< of a communication hook
    GradientBucket hooked;                           ///< what that hook was given
    std::vector<c10::Stream> producers;              ///< where its gradients were produced
    at::Tensor absent;   ///< what was sent instead of the bucket, see Note [Carried through]
    at::Tensor largest;  ///< with check_finite: of each gradient, its largest absolute value

    explicit Entry(Bucket b) : bucket(std::move(b)) {}
    /// What a communication hook, if there is one, is asked to reduce.
    bool goes_through_hook() const {
      return !bypasses_hook &&
             (bucket.kind() == Bucket::Kind::kFlat || bucket.kind() == Bucket::Kind::kInPlace);
    }
  };

  /// A plan that is not in force; see Note [Sets that come again].
  struct KeptPlan {
    std::vector<Place> places;  ///< by parameter
    BucketPlan plan;
    std::vector<Entry> entries;
    bool watches_unplanned = false;
    bool last_at_end = false;
    bool preset_in_force = false;
    size_t last_hooked = 0;
    int64_t backwards = 0;
    BucketTuner tuner;
  };

  const GroupPtr& group_of(size_t bucket) const { return groups_[bucket % groups_.size()]; }
  bool owns(const Parameter& parameter) const;
  std::string describe_bucket(size_t index) const;
  std::string describe_bucket(const std::vector<Entry>& entries, size_t index, const CommHook* hook) const;

  const ReducerOptions options_;
  GroupPtr parent_;               ///< the group that was given; carries what is agreed on between backwards
  std::vector<GroupPtr> groups_;  ///< carry backwards, see Note [An order of one's own]; none after release()
  const int rank_;
  const int world_size_;
  std::vector<NamedTensor> named_;
  std::vector<Parameter> parameters_;
  std::shared_ptr<CommHook> comm_hook_;
  std::atomic<bool> synchronizing_{true};
  std::atomic<bool> retired_{false};  ///< the Reducer is gone; only graphs of its outputs refer to this

  mutable std::mutex outputs_mutex_;  ///< guards the two below; nothing is waited for under it
  std::vector<std::weak_ptr<const Output>> outputs_;
  size_t most_outputs_ = 0;        ///< so many, before those that are gone are removed

  /// Guards everything below. Recursive, so that a bucket callback may ask for statistics.
  mutable std::recursive_mutex mutex_;
  using Lock = std::lock_guard<std::recursive_mutex>;
  BackwardScope* scope_ = nullptr;  ///< the backward in progress
  StepTracker steps_;
  StepFacts facts_sent_;         ///< in this backward
  int64_t backwards_begun_ = 0;  ///< synchronized ones
  bool broken_ = false;          ///< a collective or a hook failed: the ranks' messages do not match any more
  bool hook_failed_ = false;     ///< the communication hook of this rank threw
  bool told_ = false;            ///< every rank has heard that this backward failed
  std::pair<c10::intrusive_ptr<c10d::Work>, at::Tensor> failure_;  ///< details, after this rank has failed
  int64_t harmless_differences_ = 0;  ///< so many times ranks differed in updates, but not in parameters
  bool learning_ = true;
  bool ever_trainable_ = false;  ///< a parameter required a gradient at some time
  bool plan_for_once_ = false;   ///< the plan holds a parameter that was frozen with a local gradient
  bool asks_to_relearn_ = false; ///< parameters were frozen or unfrozen on this rank since; the others are told
  bool defers_ = false;          ///< backward may end before its buckets have arrived
  bool in_flight_ = false;       ///< one has
  int64_t backwards_with_plan_ = 0;
  bool preset_in_force_ = false; ///< the plan was given by the user: left as it is
  BucketPlan plan_;
  std::vector<Entry> entries_;     ///< the plan's buckets, then perhaps a usage bucket
  bool watches_unplanned_ = false; ///< the last entry tells of parameters outside the plan
  /// The last entry is launched when backward has ended: it tells of parameters outside the plan, or more exchanges
  /// follow, in which a rank that fails until then could not take part.
  bool last_at_end_ = false;
  size_t next_launch_ = 0;
  size_t last_hooked_ = 0;         ///< the last bucket that a communication hook is given
  int64_t clock_ = 0;
  ReasonToLeave reason_to_leave_ = ReasonToLeave::kNone;
  // See Note [Sets that come again].
  std::vector<KeptPlan> kept_plans_;  ///< by set; that of the set in force is empty
  std::optional<size_t> set_in_force_;
  Recurrence recurrence_;
  std::vector<Entry> carried_;     ///< the plan that was left, until the other ranks have left it, too
  std::shared_ptr<CommHook> carried_hook_;
  std::vector<uint8_t> used_;      ///< by parameter: contributes to this backward
  std::vector<uint8_t> kept_;      ///< by parameter: .grad was there when this backward began
  std::vector<uint8_t> used_by_any_;  ///< by parameter, at the end of backward, where it was asked for
  std::function<void(const ReducedBucket&)> callback_;
  bool joining_ = false;
  bool divide_by_initial_ = true;
  int64_t active_ranks_;           ///< that have data, while joining_
  int entered_task_ = -1;          ///< the graph task that came to this reducer last
  // See Note [Out of step in one of several].
  std::vector<std::weak_ptr<ReducerState>> companions_;
  std::optional<std::chrono::steady_clock::time_point> gives_up_;  ///< on others, when
  bool steps_compared_ = false;    ///< in this backward
  /// The exchange that compares them, where it has begun.
  struct Details {
    c10::intrusive_ptr<c10d::Work> work;
    at::Tensor all;
    bool have_digests = false;
  };
  Details details_;
  std::shared_ptr<BackwardScope> shadow_;
  BucketTuner tuner_;
  BucketPlan preset_;              ///< used instead of one made from sizes, where it fits
  std::chrono::steady_clock::time_point begin_;  ///< of this backward
  std::string deferred_error_;     ///< thrown when the other ranks have been served
  std::string out_of_step_;        ///< so, too, that ranks are out of step
  std::exception_ptr callback_error_;  ///< so, too, what the bucket callback threw
  std::unique_ptr<OverlapRecorder> overlap_;  ///< only while times are taken
  ReducerStatistics statistics_;

 private:
  void begin_backward();
  void prepare_backward();
  void announce_local_backward();
  void launch(size_t index, const at::Tensor& incoming = {});
  void launch_ready(const at::Tensor& incoming);
  bool waits_for_chain(size_t index) const;
  void run_second_phases();
  void receive(Entry& entry, const std::string& what, const GroupPtr& group);
  void unpack(Entry& entry);
  void await(size_t index);
  void complete_bucket(size_t index);
  struct Unsettled {
    int64_t index;
    std::vector<Bucket::Slot> slots;
  };
  std::vector<Unsettled> await_buckets();
  void complete(bool learnt_now);
  void or_drop_messages(const std::function<void()>& body);
  bool may_defer() const;
  void overtake_deferred();
  std::string describe_overtaken(const Parameter& parameter) const;
  size_t arrived_in_order() const;
  void send_first_needed_first(size_t arrived);
  void settle_usage();
  void reduce_apart(const std::vector<int64_t>& late);
  void extend_plan(const std::vector<int64_t>& late);
  void relearn_now();
  void exchange_plan(KeptPlan& other);
  void switch_plan(std::optional<size_t> set);
  void take_expected_plan();
  void choose_plan();
  std::optional<size_t> find_set(bool Place::*field, const std::vector<bool>& values) const;
  std::vector<bool> trainable_now() const;
  std::vector<bool> trainable_anywhere() const;
  bool take_kept_plan(const std::vector<Place>& agreed, const std::vector<int64_t>& ready);
  static void reset(Entry& entry);
  void call_back(int64_t index, const std::vector<Bucket::Slot>& slots, bool all_used);
  std::string find_non_finite();
  /// What is exchanged to agree on a plan, and the collectives that do so (none with one rank).
  struct PlanExchange {
    std::vector<at::Tensor> facts;
    std::vector<at::Tensor> order;
    c10::intrusive_ptr<c10d::Work> facts_work;
    c10::intrusive_ptr<c10d::Work> order_work;
  };
  at::Tensor plan_facts(const StepFacts& step) const;
  std::string describe_settings() const;
  at::Tensor ready_order() const;
  PlanExchange start_plan_exchange(const StepFacts& step);
  // reducer_carry.cpp
  bool carries_facts() const { return !entries_.empty() && entries_.back().bucket.carries_facts(); }
  StepFacts facts_of_step();
  void send_absent(std::vector<Entry>& entries, const std::shared_ptr<CommHook>& hook, const StepFacts& facts);
  void send_failure() noexcept;
  void carry_left_plan();
  SeenFacts await_facts(std::vector<Entry>& entries);
  void refuse_failed_step(const SeenFacts& seen);
  void compare_steps(const SeenFacts& seen, const std::vector<bool>& trainable);
  void tell_companions();
  void await_work(const c10::intrusive_ptr<c10d::Work>& work, const std::string& what, const GroupPtr& group);
  void compare_early();
  std::string error_of_companions() const;
  void look_meanwhile();
  at::Tensor pack_details(bool failed) const;
  std::pair<c10::intrusive_ptr<c10d::Work>, at::Tensor> gather_details(const at::Tensor& mine) const;
  std::vector<StepDetails> exchange_details();
  bool may_differ(const SeenFacts& seen) const;
  void start_details(std::optional<int64_t> digest = std::nullopt);
  void take_details(const std::vector<bool>& trainable);
  std::vector<StepDetails> decode_details(const at::Tensor& all) const;
  void look_back_on_failure();
  void follow_the_others() noexcept;
  int64_t digest_of_parameters(const std::vector<bool>& trainable) const;
  void remember_reduced();
  at::Tensor agree(const at::Tensor& mine, c10d::ReduceOp::RedOpType op,
                   const std::string& what) const;
  void tune();
  void note_gradient(size_t index);
  void time_begin();
  void time_launch(size_t index);
  double seconds_since_begin() const;
  ReduceCost probe_cost();
  std::vector<BucketPlan> propose_plans(const std::vector<double>& ready_s);
  std::vector<BucketPlan> broadcast_plans(const std::vector<BucketPlan>& plans);
  void adopt(const BucketPlan& plan);
  void reset_counters();
  void drop_messages() noexcept;
  int64_t divisor() const { return joining_ && !divide_by_initial_ ? active_ranks_ : world_size_; }
  bool averages_itself(const Entry& entry) const;
  bool averages_first(const Entry& entry) const;
  double scale_before(const Entry& entry) const;
  double scale_after(const Entry& entry) const;
  void join_producers(Entry& entry);
  std::vector<ParameterInfo> parameter_infos() const;
  at::Tensor allocate_registered(const GroupPtr& group, int64_t numel,
                                 const at::TensorOptions& options);
  std::function<at::Tensor(int64_t, const at::TensorOptions&)> allocator_for(size_t bucket);
  Bucket make_bucket(const std::vector<int64_t>& members, std::vector<int64_t> reported,
                     bool may_be_in_place, int facts = 0);
  int facts_on(at::Device device) const;
};

/// Lives exactly as long as the autograd engine may still call back for one backward: the engine
/// holds it in a final callback, and drops it unrun when the backward fails. See
/// Note [The end of a backward] in reducer_backward.cpp.
class BackwardScope {
 public:
  explicit BackwardScope(std::shared_ptr<ReducerState> state) : state_(std::move(state)) {}
  BackwardScope(const BackwardScope&) = delete;
  BackwardScope& operator=(const BackwardScope&) = delete;
  ~BackwardScope() {
    if (!ended_) state_->abandon(this);
  }
  void end() {
    ended_ = true;
    state_->finish(this);
  }
  void dismiss() { ended_ = true; }

 private:
  std::shared_ptr<ReducerState> state_;
  bool ended_ = false;
};

}  // namespace apex::parallel::detail
