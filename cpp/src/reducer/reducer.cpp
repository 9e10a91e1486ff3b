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

using detail::ReducerControl;
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
  if (options.limits.cap < 0 || options.limits.first_cap < 0) {
    throw InvalidArgument("limits.cap and limits.first_cap must not be negative, got " +
                          std::to_string(options.limits.cap) + " and " +
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
void ReducerControl::rebuild_buckets() {
  core_->between_backwards("rebuild_buckets()", [&](ReducerState&) {
    core_->leave_plan(ReasonToLeave::kRebuildBuckets);
  });
}
c10::intrusive_ptr<c10d::ProcessGroup> ReducerControl::communicator() const {
  return core_->locked([](const ReducerState& state) {
    const Membership& members = state.context.members;
    return members.released() ? nullptr : members.control();
  });
}
ReducerOptions ReducerControl::options() const { return core_->state().context.options; }
std::optional<BucketPlan> ReducerControl::plan() const {
  return core_->locked([](const ReducerState& state) {
    const detail::Plan* plan = state.book.current();
    return plan != nullptr ? std::optional<BucketPlan>(plan->buckets) : std::nullopt;
  });
}
std::vector<at::Tensor> ReducerControl::buffers() const { return core_->buffers(); }
const std::vector<NamedTensor>& ReducerControl::parameters() const { return core_->parameters(); }
ReducerStatistics Reducer::statistics() const { return core_->state().context.statistics.get(); }
void ReducerControl::release() { core_->release(); }

void ReducerControl::begin_join(bool divide_by_initial_world_size,
                                bool throw_on_early_termination) {
  core_->between_backwards("begin_join()", [&](ReducerState& state) {
    detail::UnevenInputs& join = state.context.join;
    if (join.active) {
      throw Error(
          "join() was entered inside another join(): wrap modules that are trained together in one "
          "DistributedDataParallel, or train them in separate loops");
    }
    join.active = true;
    join.by_ranks_with_data = !divide_by_initial_world_size;
    join.throws = throw_on_early_termination;
  });
}

void ReducerControl::end_join(const std::vector<at::Tensor>& tensors) {
  detail::ReducerContext& context = core_->state().context;
  if (!context.join.active || context.members.alone()) return leave_join();
  try {
    while (!context.join.over) core_->shadow_backward();
    if (const int64_t last = context.join.last; last >= 0) {
      const auto& group = context.members.parent;
      broadcast_coalesced(tensors, group, last, kBroadcastBytes,
                          "broadcast of parameters and buffers at the end of join()");
      // A barrier: no rank continues, or exits, before every rank has received the broadcasts.
      const at::Device device = tensors.empty() ? at::Device(at::kCPU) : tensors.front().device();
      all_reduce_coalesced({at::zeros({1}, device)}, group, 1.0, "end of join()");
    }
  } catch (...) {
    leave_join();
    throw;
  }
  leave_join();
}

void ReducerControl::leave_join() noexcept {
  core_->locked([](ReducerState& state) {
    state.context.join = {};
    // Ranks without data had other events than the others.
    state.reporter.tracker.forget();
    state.context.parameters.forget_versions();
  });
}

void ReducerControl::release_all() {
  for (const auto& core : detail::BackwardSession::all()) {
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
  core_->locked([](ReducerState& state) {
    const detail::ReducerContext& context = state.context;
    const char* reason = nullptr;
    if (!context.members.alone() && !context.reads_reports()) {
      reason =
          "on this device the host does not read the other ranks' reports: construct with "
          "check_reduction=True or on_failure='skip' (in C++, check_steps or skip_failed_steps)";
    } else if (context.phase == detail::Phase::kEnding) {
      reason = "this backward has already sent its report: call it earlier";
    }
    if (reason != nullptr) throw Error(context.me() + "skip_step(): " + reason);
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

bool Reducer::step_skipped() const { return core_->state().step_skipped; }

void ReducerControl::begin_weight(const at::Tensor& weight) {
  core_->locked([&](ReducerState& state) {
    if (!state.context.options.weighted) {
      throw Error(
          "a weight was passed, but gradients are averaged without weights: construct with "
          "gradient_average='weighted' (in C++, the option weighted)");
    }
    if (in_backward(state.context.phase))
      throw Error("a weight was passed inside backward: enter weight() before backward");
    state.reporter.weight.enter(weight);
  });
}

void ReducerControl::begin_weight(double weight) {
  begin_weight(at::scalar_tensor(weight, at::kDouble));
}

void ReducerControl::end_weight() noexcept {
  core_->locked([](ReducerState& state) { state.reporter.weight.leave(); });
}

void ReducerControl::take_weight(Reducer& other) {
  detail::BatchWeight weight;
  other.core_->locked([&](ReducerState& state) { std::swap(state.reporter.weight, weight); });
  core_->locked([&](ReducerState& state) { std::swap(state.reporter.weight, weight); });
}

double ReducerControl::total_weight() const { return core_->state().context.total_weight; }

void ReducerControl::check_replicas_next() { core_->state().reporter.replicas.compare_all_next(); }

void ReducerControl::optimizer_steps(const std::vector<at::Tensor>& parameters) {
  for (const auto& core : detail::BackwardSession::all()) {
    const detail::ReducerContext& context = core->state().context;
    if (context.phase != detail::Phase::kRunning || context.members.alone()) continue;
    for (const detail::Parameter& one : context.parameters) {
      if (one.owner->load() != core.get()) continue;
      const auto is_one = [&](const at::Tensor& stepped) { return one.variable.is_same(stepped); };
      if (std::any_of(parameters.begin(), parameters.end(), is_one))
        throw Error(context.describe_early_write(one.name));
    }
  }
}

void ReducerControl::optimizer_stepped(const std::vector<at::Tensor>& parameters) {
  for (const auto& core : detail::BackwardSession::all()) {
    const auto is_its = [&](const at::Tensor& one) {
      return one.defined() && detail::owner_of(one)->load() == core.get();
    };
    if (std::any_of(parameters.begin(), parameters.end(), is_its))
      core->state().reporter.tracker.optimizer_stepped();
  }
}

}  // namespace apex::parallel
