// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/reducer_core.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include <ATen/record_function.h>

#include <apex/error.h>
#include <apex/parallel/stall_report.h>

#include "comm/collectives.h"
#include "plain_text.h"
#include "tensor_memory.h"

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
  std::vector<std::string> settings{
      text("bucket size", options.limits.cap),
      text("first bucket size", options.limits.first_cap),
      text("bucket size in bytes", options.limits.unit == BucketLimits::Unit::kBytes),
      text("delay_allreduce", options.delay_allreduce),
      text("allreduce_trigger_params", triggers),
      text("allreduce_always_fp32", options.allreduce_always_fp32),
      text("gradient_as_bucket_view", options.gradient_as_bucket_view),
      text("gradient_average", options.gradient_average),
      text("weighted (gradient_average)", options.weighted),
      text("gradient_predivide_factor", options.gradient_predivide_factor),
      text("static_graph", options.static_graph),
      text("init_sync", options.init_sync),
      text("communicators", groups),
      text("check_finite", options.check_finite),
      text("on_failure='skip' (skip_failed_steps)", options.skip_failed_steps),
      text("replica_check_every", options.replica_check_every.value_or(-1)),
      text("on_divergence", static_cast<int>(options.on_divergence)),
      text("check_reduction (check_steps)",
           options.check_steps.has_value() ? *options.check_steps : -1)};
  settings.insert(settings.begin(), options.settings.begin(), options.settings.end());
  return settings;
}

std::string describe_reducers() {
  std::string lines;
  for (const auto& core : BackwardSession::all()) {
    const std::string state = core->describe();
    if (!state.empty()) lines += (lines.empty() ? "" : "\n") + state;
  }
  return lines;
}

}  // namespace

ReducerCore::ReducerCore(std::vector<NamedTensor> parameters, std::vector<GroupPtr> groups,
                         ReducerOptions options)
    : state_(std::move(parameters), std::move(groups), std::move(options), this) {}

void ReducerCore::begin() {
  Membership& members = context().members;
  verify_same_model(parameters(), settings_of(context().options, members.groups.size()),
                    members.parent);
  context().parameters.check_trainable(members.rank);
  if (context().options.init_sync) require_sendable(parameters(), "parameter", members.parent);
  if (!context().parameters.empty()) members.device = context().parameters[0].variable.device();
  const auto on_cpu = [](const NamedTensor& one) { return one.tensor.device().is_cpu(); };
  members.separate(std::any_of(parameters().begin(), parameters().end(), on_cpu));
  context().shares_channel =
      members.shares_groups || !std::all_of(parameters().begin(), parameters().end(), on_cpu);
  if (context().options.init_sync) {
    std::vector<at::Tensor> tensors;
    for (const NamedTensor& parameter : parameters()) tensors.push_back(parameter.tensor);
    broadcast_coalesced(tensors, members.control(), 0, kBroadcastBytes, "broadcast of parameters");
  }
  static std::once_flag described;
  std::call_once(described, [] { add_state_reader(describe_reducers); });
  BackwardSession::add(shared_from_this());
  const Lock lock(context().mutex);
  context().parameters.forget_versions();
  context().parameters.own_all();
  hook_parameters();
}

void ReducerCore::hook_parameters() {
  if (!context().parameters.empty())
    context().members.device = context().parameters[0].variable.device();
  const bool grew = context().parameters.hook(context().members.rank, [this](size_t index) {
    return make_gradient_hook(weak_from_this(), index);
  });
  const ReducerOptions& options = context().options;
  if (!grew || context().members.alone() ||
      !options.check_steps.value_or(context().members.device.is_cpu()))
    return;
  std::vector<at::Tensor> hooked;
  for (const Parameter& parameter : context().parameters) {
    if (parameter.accumulator) hooked.push_back(parameter.variable);
  }
  state_.reporter.tracker.sample(hooked);
}

// --- called by the user ---

void ReducerCore::refuse_in_backward(const char* what) const {
  if (in_backward(context().phase))
    throw Error(std::string(what) + " was called while a backward is running");
}

void ReducerCore::prepare_for_forward() {
  const Lock lock(context().mutex);
  if (in_backward(context().phase) || !context().parameters.changed()) return;
  // After a change of dtype, device, shape or strides the buckets cannot be used. The set of
  // trainable parameters is checked when a backward begins.
  if (!context().parameters.same_kind()) return leave_plan(ReasonToLeave::kParameters);
  hook_parameters();
}

void ReducerCore::watch_outputs(const std::vector<at::Tensor>& outputs) {
  torch::autograd::Node* last = nullptr;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    const auto& node = output.grad_fn();
    // A leaf has no node to hook (and would keep hooks indefinitely). It is either a parameter,
    // which is hooked already, or unrelated to parameters. The outputs of one operation need one
    // hook.
    if (!node || node.get() == last) continue;
    last = node.get();
    outputs_.watch(*node, shared_from_this());
  }
}

void ReducerCore::leave_plan(ReasonToLeave reason) {
  context().parameters.unhook();
  hook_parameters();
  state_.book.leave(reason);
}

void ReducerCore::release() {
  between_backwards("release()", [](ReducerState& state) {
    if (state.context.phase == Phase::kReleased) return;
    state.book.forget();
    state.reporter.exchange.drop();
    state.context.hook.reset();
    state.context.members.release();
    state.context.phase = Phase::kReleased;
  });
}

std::vector<at::Tensor> ReducerCore::buffers() {
  const Lock lock(context().mutex);
  std::vector<at::Tensor> buffers;
  Plan* plan = state_.book.current();
  if (plan == nullptr || !plan->holds_gradients) return buffers;
  for (const auto* buckets : {&plan->entries, &plan->on_demand}) {
    for (const PlannedBucket& entry : *buckets) {
      const at::Tensor buffer = entry.message.gradients_buffer();
      if (buffer.defined()) buffers.push_back(buffer);
    }
  }
  return buffers;
}

// --- a backward without autograd ---

void ReducerCore::shadow_backward() {
  refuse_in_backward("end_join()");
  prepare_for_forward();
  const auto session = std::make_shared<BackwardSession>();
  const UnevenInputs& join = context().join;
  std::vector<std::pair<Parameter*, at::Tensor>> kept;  // restored if no rank has data
  {
    const Lock lock(context().mutex);
    context().join.without_data = true;
    forget_cleared_weights();
    // Gradients that the other ranks have cleared must not count here. But gradients that were
    // never reduced must count.
    for (Parameter& parameter : context().parameters) {
      if (parameter.touched) continue;
      at::Tensor& grad = parameter.variable.mutable_grad();
      const bool overwritten = context().options.gradient_as_bucket_view && grad.defined();
      kept.emplace_back(&parameter, overwritten && !join.followed ? grad.detach().clone() : grad);
      grad = at::Tensor();
    }
    begin_backward(session);
  }
  session->end();
  if (!join.over) return;
  const Lock lock(context().mutex);
  for (const auto& [parameter, grad] : kept) parameter->variable.mutable_grad() = grad;
}

// --- called by autograd ---

void ReducerCore::own_parameters() {
  if (!in_backward(context().phase)) context().parameters.own_all();
}

/// Samples of gradients that were cleared in an accumulation do not count. `arrived` is a new one.
void ReducerCore::forget_cleared_weights(const Parameter* arrived) {
  if (!context().options.weighted || !state_.reporter.weight.accumulates()) return;
  bool touched = false;
  for (const Parameter& parameter : context().parameters) {
    if (&parameter == arrived || !parameter.touched) continue;
    if (parameter.variable.grad().defined()) return;
    touched = true;
  }
  if (touched) state_.reporter.weight.reset();
}

/// Counts the weight of a backward without synchronization, unless the backward fails.
void ReducerCore::weigh_local_backward(BackwardSession& session) {
  const BatchWeight before = state_.reporter.weight;
  if (!state_.reporter.weight.backward_began()) return;
  session.if_abandoned([before, weak = weak_from_this()] {
    if (const auto core = weak.lock())
      core->locked([&](ReducerState& state) { state.reporter.weight = before; });
  });
}

void ReducerCore::begin(const std::shared_ptr<BackwardSession>& session) {
  const Lock lock(context().mutex);
  if (in_backward(context().phase)) return;
  forget_cleared_weights();
  if (!synchronizing_.load()) {
    // Samples that reach a frozen discriminator are not one of its batches.
    if (!context().options.weighted) return;
    const std::vector<bool> each = context().parameters.trained();
    if (std::find(each.begin(), each.end(), true) != each.end()) weigh_local_backward(*session);
    return;
  }
  // Another reducer may own all parameters: see Note [One parameter, one reducer]. A rank with only
  // frozen parameters takes part: others may have gradients, or must detect a difference.
  if (context().parameters.ever_trainable() && context().parameters.owns_any()) {
    begin_backward(session);
  } else {
    state_.reporter.wants_skip = false;  // must not apply to a later backward
  }
}

void ReducerCore::begin_backward(const std::shared_ptr<BackwardSession>& session) {
  refuse_failed(context());
  require_same_ranks(*context().members.parent, context().members.rank, context().members.size,
                     "this reducer");
  BackwardPass pass = open_pass(context());
  state_.reporter.backward_began(pass);
  const bool without_data = context().join.without_data;
  if (!without_data) state_.reporter.weight.backward_began();
  state_.reporter.trainable = context().parameters.trained();
  state_.book.choose(state_.reporter.trainable, without_data);
  backward_ = std::make_unique<Backward>(state_, std::move(pass), *session);
  session_ = session.get();
  session->join(shared_from_this());
  if (without_data) backward_->launch_without_data();
}

void ReducerCore::gradient_ready(size_t index) {
  const Lock lock(context().mutex);
  const Parameter& parameter = context().parameters[index];
  // The reducer that owned the parameter was dropped, and no output of this one is in the graph.
  if (!in_backward(context().phase) && context().members.pid == this_pid())
    context().parameters.own_orphans(parameter);
  if (!context().parameters.owns(parameter) ||
      (context().parameters.retired() && !in_backward(context().phase)))
    return;
  if (!parameter.variable.requires_grad()) return;  // frozen after its forward
  if (in_backward(context().phase)) return backward_->gradient_ready(index);
  // Backward did not reach a watched output.
  if (synchronizing_.load()) {
    forget_cleared_weights(&parameter);
    begin_backward(BackwardSession::current());
    // This gradient is already accumulated, so its memory may be one that autograd still reads.
    backward_->pass().start.kept[index] = 0;
    return backward_->gradient_ready(index);
  }
  if (context().options.weighted && !state_.reporter.weight.has_counted()) {
    forget_cleared_weights(&parameter);
    weigh_local_backward(*BackwardSession::current());
  }
  state_.reporter.tracker.gradient_arrived_locally();
  context().parameters[index].touch();
}

// --- the end of a backward ---

/// Runs a part of the end of a backward. If it throws, notifies the other ranks if possible, and
/// ends the backward.
void ReducerCore::or_fail(const std::function<void()>& body) {
  try {
    body();
  } catch (const StepSkipped&) {  // dropped, with all gradients
    fail_backward();
  } catch (const CommunicationError&) {
    context().fail();
    fail_backward();
    throw;
  } catch (...) {
    fail_backward();
    throw;
  }
}

void ReducerCore::fail_backward() noexcept {
  backward_->fail();
  take_backward();
}

/// The backward is over: forgets what was for it alone.
std::unique_ptr<Backward> ReducerCore::take_backward() noexcept {
  session_ = nullptr;
  state_.reporter.backward_ended();
  if (context().parameters.retired()) retire();  // this backward had taken the parameters back
  return std::move(backward_);
}

void ReducerCore::send(const BackwardSession* session) {
  const Lock lock(context().mutex);
  if (session_ != session) return;
  or_fail([&] { backward_->send(); });
}

void ReducerCore::complete(const BackwardSession* session, const std::function<void()>& meanwhile) {
  const Lock lock(context().mutex);
  if (session_ != session) return;
  RECORD_USER_SCOPE("apex::reducer::finish_backward");
  or_fail([&] { backward_->complete(meanwhile); });
  if (backward_) take_backward()->conclude();  // else skipped
}

void ReducerCore::abandon(const BackwardSession* session) noexcept {
  const Lock lock(context().mutex);
  if (session_ == session) fail_backward();
}

std::string ReducerCore::out_of_step() const {
  const std::unique_lock<std::recursive_mutex> lock(context().mutex, std::try_to_lock);
  return !lock || context().phase == Phase::kReleased ? std::string()
                                                      : state_.reporter.out_of_step();
}

std::string ReducerCore::describe() const {
  const std::unique_lock<std::recursive_mutex> lock(context().mutex, std::try_to_lock);
  return lock && backward_ && context().phase == Phase::kRunning ? backward_->describe()
                                                                 : std::string();
}

}  // namespace apex::parallel::detail
