// SPDX-License-Identifier: BSD-3-Clause
#include <apex/parallel/reducer.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <apex/error.h>

#include "endings.h"
#include "reducer/reducer_core.h"
#include "watch/stall.h"
#include "watch/watcher.h"

namespace apex::parallel {

using detail::ReducerState;

namespace {

void check_options(const ReducerOptions& options, size_t parameters,
                   const std::vector<GroupPtr>& groups) {
  if (groups.empty()) throw InvalidArgument("a reducer needs at least one process group");
  if (std::find(groups.begin(), groups.end(), nullptr) != groups.end()) {
    throw InvalidArgument(
        "a process group of the reducer is null, which new_group() returns on ranks that are not "
        "members: construct reducers only on the members");
  }
  if (options.limits.cap < 0) {
    throw InvalidArgument("limits.cap must be positive, got " + std::to_string(options.limits.cap));
  }
  if (options.limits.first_cap < 0) {
    throw InvalidArgument("limits.first_cap must not be negative, got " +
                          std::to_string(options.limits.first_cap));
  }
  if (options.limits.cap == 0 && options.limits.first_cap > 0) {
    throw InvalidArgument(
        "limits.first_cap, the size of the first bucket, also needs limits.cap, the size of the "
        "others");
  }
  const double factor = options.gradient_predivide_factor;
  if (!(factor > 0) || !std::isfinite(factor)) {
    throw InvalidArgument("gradient_predivide_factor must be positive and finite, got " +
                          std::to_string(factor));
  }
  if (options.weighted && (!options.gradient_average || factor != 1.0)) {
    throw InvalidArgument(
        "weighted divides by the sum of the ranks' weights, so it requires gradient_average and a "
        "gradient_predivide_factor of 1");
  }
  if (options.replica_check_every.value_or(1) < 0) {
    throw InvalidArgument("replica_check_every must be a number of steps, or 0, got " +
                          std::to_string(*options.replica_check_every));
  }
  if (options.delay_allreduce && !options.trigger_parameters.empty()) {
    throw InvalidArgument(
        "delay_allreduce launches every bucket at the end of backward, so allreduce_trigger_params "
        "(in C++, trigger_parameters) has no effect: pass only one of them");
  }
  for (const int64_t index : options.trigger_parameters) {
    if (index < 0 || static_cast<size_t>(index) >= parameters) {
      throw InvalidArgument("trigger parameter " + std::to_string(index) + " is not one of the " +
                            std::to_string(parameters) + " parameters");
    }
  }
}

/// @throws Error if it is too late for this rank to skip a step.
void refuse_to_skip(const detail::ReducerContext& context) {
  const char* reason = nullptr;
  if (!context.members.alone() && !context.reads_reports()) {
    reason =
        "on this device the host does not read the other ranks' reports: construct with "
        "check_reduction=True or on_failure='skip' (in C++, check_steps or skip_failed_steps)";
  } else if (context.phase == detail::Phase::kEnding) {
    reason = "this backward has already sent its report: call it earlier";
  }
  if (reason != nullptr) throw Error(context.me() + "skip_step(): " + reason);
}

void refuse_weight(const detail::ReducerContext& context) {
  if (!context.options.weighted) {
    throw Error(
        "a weight was passed, but gradients are averaged without weights: construct with weighted");
  }
  if (in_backward(context.phase))
    throw Error("a weight was passed inside backward: enter weight() before backward");
}

/// @throws Error in a backward that averages one of `stepped`.
void refuse_early_step(const detail::ReducerContext& context,
                       const std::vector<at::Tensor>& stepped) {
  if (context.phase != detail::Phase::kRunning || context.members.alone()) return;
  for (const detail::Parameter& one : context.parameters) {
    for (const at::Tensor& parameter : stepped) {
      if (one.variable.is_same(parameter))
        throw Error(detail::Backward::describe_early_write(context, one));
    }
  }
}

}  // namespace

Reducer::Reducer(std::vector<NamedTensor> parameters, std::vector<GroupPtr> groups,
                 ReducerOptions options) {
  const size_t given = parameters.size();
  const bool triggers = !options.trigger_parameters.empty();
  check_options(options, given, groups);
  core_ = std::make_shared<detail::ReducerCore>(std::move(parameters), std::move(groups),
                                                std::move(options));
  if (triggers && core_->parameters().size() != given) {
    throw InvalidArgument("trigger_parameters need a parameter list without duplicates");
  }
  core_->begin();
}

Reducer::~Reducer() {
  if (core_) core_->retire();
}

void Reducer::prepare_for_forward() { core_->prepare_for_forward(); }
void Reducer::watch_outputs(const std::vector<at::Tensor>& outputs) {
  core_->watch_outputs(outputs);
}
void Reducer::set_synchronizing(bool on) { core_->synchronizing() = on; }
bool Reducer::synchronizing() const { return core_->synchronizing(); }
void Reducer::set_comm_hook(std::shared_ptr<CommHook> hook) {
  core_->between_backwards("set_comm_hook()", [&](ReducerState& state) {
    core_->leave_plan(ReasonToLeave::kCommHook);
    state.context.hook = std::move(hook);
  });
}
void Reducer::rebuild_buckets() {
  core_->between_backwards("rebuild_buckets()", [&](ReducerState&) {
    core_->leave_plan(ReasonToLeave::kRebuildBuckets);
  });
}
c10::intrusive_ptr<c10d::ProcessGroup> Reducer::communicator() const {
  return core_->read([](const ReducerState& state) {
    const Membership& members = state.context.members;
    return members.released() ? nullptr : members.control();
  });
}
ReducerOptions Reducer::options() const {
  return core_->read([](const ReducerState& state) { return state.context.options; });
}
std::optional<BucketPlan> Reducer::plan() const {
  return core_->read([](const ReducerState& state) {
    const detail::Plan* plan = state.book.current();
    return plan != nullptr ? std::optional<BucketPlan>(plan->buckets) : std::nullopt;
  });
}
std::vector<at::Tensor> Reducer::buffers() const { return core_->buffers(); }
const std::vector<NamedTensor>& Reducer::parameters() const { return core_->parameters(); }
ReducerStatistics Reducer::statistics() const {
  return core_->read([](const ReducerState& state) { return state.context.statistics.get(); });
}
void Reducer::release() { core_->release(); }

void Reducer::begin_join(bool divide_by_initial_world_size) {
  const auto announce = [weak = std::weak_ptr<detail::ReducerCore>(core_)](int64_t argument) {
    if (const auto core = weak.lock())
      core->uneven_inputs().announce({JoinEvent::kCustom, argument});
  };
  core_->between_backwards("begin_join()", [&](ReducerState&) {
    core_->uneven_inputs().begin(divide_by_initial_world_size, announce);
  });
}
void Reducer::end_join() {
  core_->uneven_inputs().follow();
  core_->change([this](ReducerState& state) {
    core_->uneven_inputs().end();
    // Ranks without data had other events than the others.
    state.reporter.tracker.forget();
    state.context.parameters.forget_versions();
  });
}
JoinEvent Reducer::announce(JoinEvent::Kind kind, int64_t argument) {
  return core_->uneven_inputs().announce({kind, argument});
}
JoinEvent Reducer::await_event() { return core_->uneven_inputs().await_event(); }
void Reducer::shadow_backward_begin(const JoinEvent& event) { core_->shadow_backward_begin(event); }
void Reducer::shadow_backward_end() { core_->shadow_backward_end(); }
int64_t Reducer::last_with_data(bool followed) const {
  return core_->uneven_inputs().last_with_data(followed);
}

int64_t Reducer::follow_until_end(const std::function<void(const JoinEvent&)>& on_event) {
  bool followed = false;
  for (JoinEvent event = await_event(); event.kind != JoinEvent::kEnd; event = await_event()) {
    followed = true;
    if (event.kind == JoinEvent::kBackward) {
      shadow_backward_begin(event);
      if (event.end_follows) {
        while ((event = await_event()).kind != JoinEvent::kBackwardEnd) on_event(event);
      }
      shadow_backward_end();
    } else if (event.kind == JoinEvent::kForward || event.kind == JoinEvent::kCustom) {
      if (event.kind == JoinEvent::kForward) prepare_for_forward();
      on_event(event);
    }
  }
  end_join();
  return last_with_data(followed);
}

void Reducer::release_all() {
  for (const auto& core : detail::all_reducers()) {
    try {
      core->release();
    } catch (const Error&) {
      // A backward is in progress.
    }
  }
  end_answers();
  finish_dropped_groups();
}

at::Tensor Reducer::skip_step() {
  core_->prepare_for_forward();  // there may be no forward before the backward
  core_->change([](ReducerState& state) {
    refuse_to_skip(state.context);
    state.reporter.wants_skip = true;
  });
  const at::Device device =
      parameters().empty() ? at::Device(at::kCPU) : parameters().front().tensor.device();
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode grads(true);
  const auto kind = at::TensorOptions(device).dtype(at::kFloat);
  const at::Tensor loss = at::zeros({}, kind).requires_grad_().mul(1);
  core_->watch_outputs({loss});
  return loss;
}

bool Reducer::step_skipped() const {
  return core_->read([](const ReducerState& state) { return state.step_skipped; });
}

void Reducer::begin_weight(const at::Tensor& weight) {
  core_->change([&](ReducerState& state) {
    refuse_weight(state.context);
    state.reporter.weight.enter(weight);
  });
}

void Reducer::begin_weight(double weight) {
  core_->change([&](ReducerState& state) {
    refuse_weight(state.context);
    state.reporter.weight.enter(weight);
  });
}

void Reducer::end_weight() noexcept {
  core_->change([](ReducerState& state) { state.reporter.weight.leave(); });
}

void Reducer::take_weight(Reducer& other) {
  detail::BatchWeight weight;
  other.core_->change([&](ReducerState& state) { std::swap(state.reporter.weight, weight); });
  core_->change([&](ReducerState& state) { std::swap(state.reporter.weight, weight); });
}

double Reducer::total_weight() const {
  return core_->read([](const ReducerState& state) { return state.context.total_weight; });
}

void Reducer::check_replicas_next() {
  core_->note([](ReducerState& state) { state.reporter.replicas.compare_all_next(); });
}

void Reducer::optimizer_steps(const std::vector<at::Tensor>& parameters) {
  for (const auto& core : detail::owners_of(parameters)) {
    core->read([&](const ReducerState& state) { refuse_early_step(state.context, parameters); });
  }
}

void Reducer::optimizer_stepped(const std::vector<at::Tensor>& parameters, int64_t optimizer) {
  for (const auto& core : detail::owners_of(parameters)) {
    // Not change(): a communication hook may wait for this thread.
    core->note([&](ReducerState& state) { state.reporter.tracker.optimizer_stepped(optimizer); });
  }
}

}  // namespace apex::parallel
