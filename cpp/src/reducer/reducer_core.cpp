// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/reducer_core.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>

#include <apex/error.h>

#include "comm/announcer.h"
#include "comm/collectives.h"
#include "plain_text.h"
#include "reducer/hooks.h"
#include "reducer/join_protocol.h"
#include "reducer/registry.h"

namespace apex::parallel::detail {

namespace {

std::vector<std::string> settings_of(const ReducerOptions& options, size_t groups) {
  auto text = [](const char* name, auto value) {
    PlainText out;
    out << name << '=' << value;
    return out.str();
  };
  std::string triggers;
  for (const int64_t index : options.trigger_parameters) triggers += std::to_string(index) + ' ';
  std::vector<std::string> settings = options.settings;
  const std::vector<std::string> own{
      text("bucket size", options.limits.cap),
      text("first bucket size", options.limits.first_cap),
      text("bucket size in bytes", options.limits.unit == BucketLimits::Unit::kBytes),
      text("delay_allreduce", options.delay_allreduce),
      text("allreduce_trigger_params", triggers),
      text("allreduce_always_fp32", options.allreduce_always_fp32),
      text("gradient_as_bucket_view", options.gradient_as_bucket_view),
      text("gradient_average", options.gradient_average),
      text("gradient_predivide_factor", options.gradient_predivide_factor),
      text("static_graph", options.static_graph),
      text("init_sync", options.init_sync),
      text("communicators", groups),
      text("check_finite", options.check_finite),
      text("on_failure='skip' (skip_failed_steps)", options.skip_failed_steps),
      text("check_reduction (check_steps)",
           options.check_steps.has_value() ? *options.check_steps : -1)};
  settings.insert(settings.end(), own.begin(), own.end());
  return settings;
}

}  // namespace

ReducerCore::ReducerCore(std::vector<NamedTensor> parameters, std::vector<GroupPtr> groups,
                         ReducerOptions options)
    : context_(std::move(parameters), std::move(groups), std::move(options), this),
      step_(context_),
      overtaken_(context_.parameters.size(), 0) {}

ReducerCore::~ReducerCore() { drop_reducer(this); }

void ReducerCore::begin() {
  Membership& members = context_.members;
  verify_same_model(parameters(), settings_of(context_.options, members.groups.size()),
                    members.parent);
  context_.parameters.check_trainable(members.rank);
  if (context_.options.init_sync) require_sendable(parameters(), "parameter", members.parent);
  remember_processes(*members.parent);
  if (!context_.parameters.empty()) members.device = context_.parameters[0].variable.device();
  members.separate(
      std::any_of(parameters().begin(), parameters().end(),
                  [](const NamedTensor& parameter) { return parameter.tensor.device().is_cpu(); }));
  if (context_.options.init_sync) {
    std::vector<at::Tensor> tensors;
    for (const NamedTensor& parameter : parameters()) tensors.push_back(parameter.tensor);
    broadcast_coalesced(tensors, members.control(), 0, kBroadcastBytes, "broadcast of parameters");
  }
  add_reducer(shared_from_this());
  const Change change(context_.monitor);
  context_.parameters.forget_versions();
  context_.parameters.own_all();
  hook_parameters();
}

void ReducerCore::hook_parameters() {
  if (!context_.parameters.empty())
    context_.members.device = context_.parameters[0].variable.device();
  context_.parameters.hook(context_.members.rank, [this](size_t index) {
    return make_gradient_hook(weak_from_this(), index);
  });
}

void ReducerCore::enter(Phase phase) {
  TORCH_INTERNAL_ASSERT(may_follow(phase_, phase), "apex reducer: phase ", static_cast<int>(phase),
                        " after ", static_cast<int>(phase_));
  phase_ = phase;
}

void ReducerCore::fail() {
  if (phase_ != Phase::kFailed && phase_ != Phase::kReleased) enter(Phase::kFailed);
}

void ReducerCore::refuse_in_backward(const char* what) const {
  const Read read(context_.monitor);
  if (in_backward(phase_)) throw Error(std::string(what) + " while a backward is running");
}

void ReducerCore::complete_deferred() {
  if (phase_ == Phase::kDeferred) complete();
}

// Note [Parameters that are frozen or unfrozen]
//
// A change of dtype, device, shape or strides leaves the buckets without use: they are made again,
// and every rank has to make the change before the same forward. Freezing and unfreezing, however,
// may well depend on what a rank has seen, and ranks that forgot the plan at different times would
// meet in collectives of different sizes. So the rank keeps the plan, and asks the others in the
// next synchronized backward for a new one: by one of the facts in its last message. A frozen
// parameter counts as not used in that backward; one that was unfrozen is reduced at its end, when
// all ranks have agreed on the new plan. The facts have to be read after every backward, which
// costs nothing where the message lies on the CPU; elsewhere the host would have to wait for the
// device, and ranks have to freeze and unfreeze alike.

void ReducerCore::follow_change() {
  complete_deferred();
  if (!context_.parameters.same_kind()) {
    refresh(ReasonToLeave::kParameters);
    return;
  }
  const bool same_set = context_.parameters.same_set();
  context_.parameters.unhook();
  hook_parameters();
  // Else choose_plan() sees to it.
  if (!same_set && context_.defers) leave_plan(ReasonToLeave::kFrozen);
}

void ReducerCore::refresh(ReasonToLeave reason) {
  context_.parameters.unhook();
  hook_parameters();
  leave_plan(reason);
}

/// Lets go of a plan that the other ranks may not let go of. They find out in the next backward;
/// see Note [Carried through].
void ReducerCore::leave_plan(ReasonToLeave reason) {
  book_.take_expected();  // as the others do
  const Plan* plan = book_.current();
  if (plan != nullptr && plan->carries_facts() && left_.empty()) {
    left_ = std::move(book_.leave().entries);
    step_.set_reason(reason);
  } else {
    book_.forget();
  }
}

/// Of the settings that may change between backwards, those that all ranks must share.
std::string ReducerCore::describe_settings() const {
  return (context_.hook ? "the communication hook '" + context_.hook->name() + "'"
                        : std::string("no communication hook")) +
         (context_.defers ? ", an OverlappedOptimizer (set_deferred)" : "");
}

void ReducerCore::prepare_for_forward() {
  const Change change(context_.monitor);
  forward_since_ = true;
  if (!in_backward(phase_) && context_.parameters.changed()) follow_change();
}

void ReducerCore::watch_outputs(const std::vector<at::Tensor>& outputs) {
  torch::autograd::Node* last = nullptr;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    const auto& node = output.grad_fn();
    // A leaf has no node to hook (and keeps its hooks for ever): it is a parameter, hooked already,
    // or nothing to do with parameters. Outputs of one operation need one hook.
    if (!node || node.get() == last) continue;
    last = node.get();
    auto watched = std::make_shared<const WatchedOutput>(WatchedOutput{last});
    outputs_.add(watched);
    node->add_pre_hook(make_output_hook(shared_from_this(), std::move(watched)));
  }
}

void ReducerCore::set_comm_hook(std::shared_ptr<CommHook> hook) {
  refuse_in_backward("set_comm_hook()");
  const Change change(context_.monitor);
  complete_deferred();
  leave_plan(ReasonToLeave::kCommHook);
  context_.hook = std::move(hook);
}

void ReducerCore::relearn() {
  refuse_in_backward("relearn()");
  const Change change(context_.monitor);
  complete_deferred();
  refresh(ReasonToLeave::kRelearn);
}

void ReducerCore::release() {
  refuse_in_backward("release()");
  const Change change(context_.monitor);
  if (phase_ == Phase::kReleased) return;
  if (phase_ == Phase::kDeferred) drop_messages();
  book_.forget();
  left_.clear();
  step_.drop();
  context_.hook.reset();
  callback_ = nullptr;
  context_.members.release();
  enter(Phase::kReleased);
}

void ReducerCore::set_bucket_callback(std::function<void(const ReducedBucket&)> callback) {
  refuse_in_backward("set_bucket_callback()");
  const Change change(context_.monitor);
  complete_deferred();
  callback_ = std::move(callback);
}

void ReducerCore::set_deferred(bool on) {
  refuse_in_backward("set_deferred()");
  const Change change(context_.monitor);
  complete_deferred();
  if (context_.defers == on) return;
  if (on && context_.options.skip_failed_steps) {
    throw InvalidArgument(
        "with OverlappedOptimizer (set_deferred) parameters are updated before it is known whether "
        "another rank failed, so failed steps cannot be skipped: construct without "
        "on_failure='skip' (skip_failed_steps)");
  }
  context_.defers = on;
  refresh(ReasonToLeave::kDeferred);
}

bool ReducerCore::deferred() const {
  const Read read(context_.monitor);
  return context_.defers;
}

void ReducerCore::wait() {
  refuse_in_backward("wait()");
  const Change change(context_.monitor);
  complete_deferred();
}

void ReducerCore::wait_for(const std::vector<int64_t>& parameters) {
  const Change change(context_.monitor);
  for (const int64_t index : parameters) {
    if (index < 0 || static_cast<size_t>(index) >= context_.parameters.size()) {
      throw InvalidArgument("wait_for(): parameter " + std::to_string(index) +
                            " is not one of the " + std::to_string(context_.parameters.size()) +
                            " parameters");
    }
    // Not so in a checkpointed segment that backward runs again.
    if (phase_ != Phase::kDeferred) return;
    Plan& plan = *book_.current();
    const int64_t bucket = plan.places[index].bucket;
    if (bucket < 0 || plan.entries[bucket].completed) continue;
    or_drop([&] { complete_entry(static_cast<size_t>(bucket)); });
    if (pass_->failure) return complete_deferred();  // throws it
    if (pass_->callback_error)
      std::rethrow_exception(std::exchange(pass_->callback_error, nullptr));
  }
  if (phase_ != Phase::kDeferred) return;
  const Plan& plan = *book_.current();
  const auto end = plan.entries.begin() + static_cast<int64_t>(plan.buckets.buckets.size());
  if (std::all_of(plan.entries.begin(), end,
                  [](const PlannedBucket& entry) { return entry.completed; })) {
    complete_deferred();
  }
}

std::vector<int64_t> ReducerCore::parameters_in_flight() const {
  std::vector<int64_t> waiting;
  if (phase_ != Phase::kDeferred) return waiting;
  const Plan& plan = *book_.current();
  for (size_t i = 0; i < plan.places.size(); ++i) {
    const int64_t bucket = plan.places[i].bucket;
    if (bucket >= 0 && !plan.entries[bucket].completed) waiting.push_back(static_cast<int64_t>(i));
  }
  return waiting;
}

std::vector<int64_t> ReducerCore::in_flight() const {
  const Read read(context_.monitor);
  return parameters_in_flight();
}

std::optional<BucketPlan> ReducerCore::plan() const {
  const Read read(context_.monitor);
  const Plan* plan = book_.current();
  return plan != nullptr ? std::optional<BucketPlan>(plan->buckets) : std::nullopt;
}

std::vector<at::Tensor> ReducerCore::buffers() {
  const Change change(context_.monitor);
  complete_deferred();
  std::vector<at::Tensor> buffers;
  const Plan* plan = book_.current();
  if (plan == nullptr || !plan->holds_gradients) return buffers;
  for (size_t i = 0; i < plan->buckets.buckets.size(); ++i) {
    buffers.push_back(plan->entries[i].message.gradients_buffer());
  }
  return buffers;
}

void ReducerCore::adopt(const BucketPlan& buckets) {
  Plan& plan = *book_.current();
  if (buckets == plan.buckets) return;
  plan.buckets = buckets;
  build_entries(plan, context_);
}

void ReducerCore::set_plan(const BucketPlan& plan) {
  refuse_in_backward("set_plan()");
  const Change change(context_.monitor);
  complete_deferred();
  const ParameterTable& parameters = context_.parameters;
  std::vector<bool> seen(parameters.size(), false);
  for (const auto& bucket : plan.buckets) {
    for (const int64_t index : bucket) {
      if (index < 0 || static_cast<size_t>(index) >= parameters.size() || seen[index]) {
        throw InvalidArgument("a bucket plan names parameter " + std::to_string(index) +
                              ", which is not one of the " + std::to_string(parameters.size()) +
                              " parameters, or named twice");
      }
      seen[index] = true;
      const Parameter& first = parameters[bucket.front()];
      const Parameter& one = parameters[index];
      if (one.variable.scalar_type() != first.variable.scalar_type() ||
          one.variable.device() != first.variable.device()) {
        throw InvalidArgument("a bucket plan puts parameters '" + first.name + "' and '" +
                              one.name + "' together, which differ in dtype or device");
      }
    }
  }
  const auto count = static_cast<int64_t>(parameters.size());
  std::vector<BucketPlan> agreed =
      context_.monitor.open([&] { return broadcast_plans(context_.members, {plan}, count); });
  preset_ = agreed.empty() ? BucketPlan{} : std::move(agreed.front());
  refresh(ReasonToLeave::kPlan);
}

void ReducerCore::record_overlap(bool on) {
  refuse_in_backward("record_overlap()");
  const Change change(context_.monitor);
  complete_deferred();
  if (on == (recorder_ != nullptr)) return;
  if (on) {
    recorder_ = std::make_unique<OverlapRecorder>();
    context_.observers.add(recorder_.get());
  } else {
    context_.observers.remove(recorder_.get());
    recorder_.reset();
  }
}

std::optional<OverlapReport> ReducerCore::overlap_report() const {
  const Read read(context_.monitor);
  if (!recorder_) return std::nullopt;
  std::optional<OverlapReport> report = recorder_->report();
  if (!report) return report;
  for (BucketOverlap& bucket : report->buckets) {
    for (const int64_t parameter : bucket.parameters)
      bucket.names.push_back(context_.parameters[parameter].name);
  }
  return report;
}

GroupPtr ReducerCore::communicator() const {
  const Read read(context_.monitor);
  return context_.members.released() ? nullptr : context_.members.control();
}

void ReducerCore::optimizer_stepped(int64_t optimizer, bool all) {
  const Change change(context_.monitor);
  step_.tracker.optimizer_stepped(optimizer, all);
}

void ReducerCore::refuse_step_in_backward(const at::Tensor& parameter) const {
  const Read read(context_.monitor);
  if (phase_ != Phase::kRunning || context_.members.alone()) return;
  const auto stepped =
      std::find_if(context_.parameters.begin(), context_.parameters.end(),
                   [&](const Parameter& one) { return one.variable.is_same(parameter); });
  if (stepped != context_.parameters.end()) throw Error(describe_early_write(*stepped));
}

void ReducerCore::skip_step() {
  const Change change(context_.monitor);
  const char* reason = nullptr;
  if (context_.defers || (callback_ && !context_.options.skip_failed_steps)) {
    reason =
        "with OverlappedOptimizer or a bucket callback, parameters are updated before it is known "
        "whether a rank skips the step: step after backward, or, with a callback, construct with "
        "on_failure='skip' (skip_failed_steps)";
  } else if (!context_.members.alone() && !context_.reads_facts(context_.members.device)) {
    reason =
        "on this device the host does not read what other ranks report: construct with "
        "check_reduction=True (check_steps) or on_failure='skip' (skip_failed_steps)";
  } else if (in_backward(phase_) && pass_->reported) {
    reason =
        "the last bucket of this backward was launched already, and its report with it: construct "
        "with on_failure='skip' (skip_failed_steps), which launches it when backward has ended";
  }
  if (reason != nullptr) throw Error(context_.me() + "skip_step(): " + reason);
  wants_skip_ = true;
}

bool ReducerCore::step_skipped() const {
  const Read read(context_.monitor);
  return step_skipped_;
}

void ReducerCore::begin_join(bool divide_by_initial_world_size) {
  refuse_in_backward("begin_join()");
  const Change change(context_.monitor);
  complete_deferred();
  context_.joining = true;
  context_.divisor = context_.members.size;
  divide_by_initial_ = divide_by_initial_world_size;
  announces_ends_ = false;
  set_announcer(this, [core = weak_from_this()](int64_t argument) {
    if (const auto self = core.lock()) self->join_event(true, JoinEvent::kCustom, argument);
  });
}

/// This rank has run out of data: it announces nothing any more.
void ReducerCore::follow() { clear_announcer(this); }

void ReducerCore::end_join() {
  clear_announcer(this);
  const Change change(context_.monitor);
  context_.joining = false;
  context_.divisor = context_.members.size;
  // Ranks without data have not done what the others did.
  step_.tracker.forget();
  context_.parameters.forget_versions();
}

JoinEvent ReducerCore::join_event(bool active, JoinEvent::Kind kind, int64_t argument) {
  const Change change(context_.monitor);
  announces_ends_ = announces_ends_ || (active && kind == JoinEvent::kCustom);
  JoinEvent event;
  try {
    event = context_.monitor.open(
        [&] { return exchange_join_event(context_, active, kind, argument); });
  } catch (...) {
    if (pass_) pass_->owes_end = false;  // it was an error on every rank, and nobody waits for it
    throw;
  }
  if (!event.active.empty() && !divide_by_initial_)
    context_.divisor = static_cast<int64_t>(event.active.size());
  return event;
}

int64_t ReducerCore::last_with_data(bool followed, int64_t states) const {
  const Change change(context_.monitor);
  return context_.monitor.open([&] { return detail::last_with_data(context_, followed, states); });
}

}  // namespace apex::parallel::detail
