// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <apex/error.h>
#include <apex/interruption.h>

#include "reducer/reducer_core.h"
#include "tensor_parts.h"
#include "torch_version.h"

namespace apex::parallel::detail {

// Note [The end of a backward]
//
// The reduction ends in a final callback of the autograd engine, so that gradients are complete
// when backward() returns. A final callback belongs to the graph task in which it was queued.
// Reentrant checkpointing runs segments of the model in inner graph tasks, and a callback queued by
// a gradient inside one would run before the outer backward is done. So it is queued from the first
// of our hooks that runs: normally the one on the model's outputs (watch_outputs), which runs in
// the outer task; a gradient's own hook queues it only where backward did not come through a
// watched output.
//
// The callback owns a BackwardScope. If backward fails the engine destroys its callbacks without
// running them, and the scope's destructor resets the reducer: there is no state to guess about in
// the next backward, whether or not there is one.
//
// Which reducers take part in a backward, see Note [One backward, all its reducers].
//
// An output's hook also runs for autograd.grad(), which computes gradients without accumulating
// any. The engine then has a list of what to execute, and a backward that leaves gradients has
// none; with backward(inputs=...), which has one too, the first gradient that is accumulated opens
// the scope.

// Note [Order of launches]
//
// Collectives of one process group must be issued in the same order on every rank, but gradients
// become ready in an order that may differ. So buckets have one order, the plan's, and a bucket is
// launched only when all before it were. Only the thread that changes the reducer launches.

void ReducerCore::own_parameters() {
  const Change change(context_.monitor);
  if (!in_backward(phase_)) context_.parameters.own_all();
}

bool ReducerCore::has_entered(int task) const {
  const Read read(context_.monitor);
  return entered_task_ == task;
}

void ReducerCore::accompany(const std::vector<std::shared_ptr<ReducerCore>>& in_graph) {
  const Change change(context_.monitor);
  companions_.set(in_graph, this);
}

void ReducerCore::output_reached(int task) {
  const Change change(context_.monitor);
  // A graph task is entered once, however many outputs it comes through.
  if (std::exchange(entered_task_, task) == task || in_backward(phase_)) return;
  if (!synchronizing_.load()) {
    overtake_deferred();
    announce_local_backward();
    return;
  }
  choose_plan();
  // Without a parameter in the plan, or one that may still get there, there is nothing to do. While
  // a plan is recorded there may be: a frozen parameter's gradient, accumulated before, on another
  // rank only.
  const Plan* plan = book_.current();
  const bool anything =
      plan != nullptr ? !plan->entries.empty() : context_.parameters.ever_trainable();
  // All taken by another reducer: see Note [One parameter, one reducer].
  if (anything && context_.parameters.owns_any()) {
    begin_backward();
  } else {
    wants_skip_ = false;  // not of a later backward
    announce_local_backward();
  }
}

void ReducerCore::announce_local_backward() {
  if (context_.joining) join_event(true, JoinEvent::kLocalBackward, 0);
}

/// Before a backward: takes the plan that all ranks expect; or, where ranks hear nothing of each
/// other, the plan of what is trainable here, which has to be the same on all.
void ReducerCore::choose_plan() {
  context_.monitor.open([&] { step_.look_back_on_failure(); });
  if (step_.hooks_apart()) fail();
  book_.take_expected();
  const Plan* plan = book_.current();
  wants_rebuild_ = false;
  if (plan == nullptr) return;
  for (size_t i = 0; i < plan->places.size(); ++i) {
    wants_rebuild_ =
        wants_rebuild_ || plan->places[i].trainable_here != context_.parameters.trains(i);
  }
  if (!wants_rebuild_ || plan->carries_facts() || context_.defers) return;
  book_.take_for(context_.parameters.trained());
  wants_rebuild_ = false;
}

/// Looks at the gradients and parameters as they are when a backward begins.
BackwardPass ReducerCore::prepare_pass() {
  ParameterTable& parameters = context_.parameters;
  std::optional<c10::Device> device;
  bool several = false;
  for (const Parameter& parameter : parameters) {
    if (!parameter.trainable) continue;
    several = several || (device && *device != parameter.device);
    device = parameter.device;
  }
  if (!device) device = c10::Device(at::kCPU);  // frozen on this rank, and zeros for the others
  if (several) device.reset();
  context_.observers.tell(&BackwardObserver::began, device, parameters.size());

  BackwardPass pass(parameters.size());
  pass.wants_rebuild = wants_rebuild_;
  bool changed = false;
  bool touched_changed = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& parameter = parameters[i];
    const at::Tensor& grad = parameter.variable.grad();
    const bool owned = parameters.owns(parameter);
    if (owned) {
      const uint32_t version = version_of(parameter.variable);
      changed = changed || version != parameter.seen_version;
      touched_changed =
          touched_changed || (parameter.touched && version != parameter.touched_version);
      parameter.seen_version = version;
    }
    pass.kept[i] = grad.defined();
    // What accumulated without synchronization is part of this reduction.
    pass.used[i] = parameter.touched && owned && grad.defined();
    if (context_.options.gradient_average && !context_.joining) continue;
    const auto reduced = parameter.reduced.lock();
    pass.gradients[i].stale = grad.defined() && reduced &&
                              reduced.get() == grad.unsafeGetTensorImpl() &&
                              grad._version() == parameter.reduced_version;
  }
  step_.backward_began();
  step_.tracker.backward_began(changed, touched_changed);
  return pass;
}

void ReducerCore::begin_backward() {
  if (phase_ == Phase::kReleased) {
    throw Error(
        "backward after the reducer let go of its process groups (release(), or the end of the "
        "interpreter): gradients would not be averaged");
  }
  if (phase_ == Phase::kFailed) {
    throw CommunicationError(
        context_.me() +
        "a collective, or the communication hook of some ranks, failed in an earlier backward, so "
        "the messages of the ranks do not match any more: start again with a new process group "
        "and a new wrapper");
  }
  require_same_ranks(*context_.members.parent, context_.members.rank, context_.members.size,
                     "this reducer");
  companions_.forget();
  overtake_deferred();
  BackwardPass pass = prepare_pass();
  if (book_.current() != nullptr) book_.current()->move_misplaced_gradients();
  if (context_.joining) {
    const bool kept = std::any_of(pass.gradients.begin(), pass.gradients.end(),
                                  [](const GradientState& gradient) { return gradient.stale; });
    join_event(true, JoinEvent::kBackward,
               (kept ? JoinEvent::kKept : 0) | (announces_ends_ ? JoinEvent::kEndFollows : 0));
    pass.owes_end = announces_ends_;
  }
  auto scope = std::make_shared<BackwardScope>(shared_from_this());
  try {
    torch::autograd::Engine::get_default_engine().queue_callback([scope] { scope->end(); });
  } catch (...) {
    scope->dismiss();
    throw;
  }
  begin_scope(scope, std::move(pass));
}

void ReducerCore::begin_scope(const std::shared_ptr<BackwardScope>& scope, BackwardPass pass) {
  pass_ = std::move(pass);
  scope_ = scope.get();
  step_skipped_ = false;
  enter(Phase::kRunning);
}

void ReducerCore::shadow_backward_begin(int64_t argument) {
  refuse_in_backward("shadow_backward_begin()");
  const Change change(context_.monitor);
  // What the others have cleared must not count here either, nor what they divide among themselves;
  // what has never been reduced still has to.
  const bool counts = (argument & JoinEvent::kKept) != 0 && divide_by_initial_;
  for (Parameter& parameter : context_.parameters) {
    if (!counts && !parameter.touched) parameter.variable.mutable_grad() = at::Tensor();
  }
  choose_plan();
  wants_rebuild_ = false;  // what is trainable is for those who have data to say
  shadow_ = std::make_shared<BackwardScope>(shared_from_this());
  begin_scope(shadow_, prepare_pass());
  Plan* plan = book_.current();
  if (plan == nullptr) return;
  for (PlannedBucket& entry : plan->entries) entry.pending = 0;  // nothing here is waited for
  if ((argument & JoinEvent::kEndFollows) == 0) launch_ready({});
}

void ReducerCore::shadow_backward_end() {
  const Change change(context_.monitor);
  if (!shadow_) throw Error("shadow_backward_end() without shadow_backward_begin()");
  const auto shadow = std::move(shadow_);
  shadow->end();
}

/// Before a backward: completes the last one, and notes which parameters nobody has waited for.
void ReducerCore::overtake_deferred() {
  const std::vector<int64_t> overtaken = parameters_in_flight();
  complete_deferred();
  // A second backward of the same forward has used nothing since.
  if (!std::exchange(forward_since_, false)) return;
  for (const int64_t i : overtaken) overtaken_[i] = 1;
}

namespace {

std::string describe_overtaken(const std::string& name) {
  return "parameter '" + name +
         "' got a gradient, but forward used it without waiting for its last one, so before it was "
         "updated "
         "(it is not used through the forward of the module that owns it). Wait for it first, see "
         "OverlappedOptimizer.synchronize() or Reducer::wait_for(), or do without overlapping.";
}

}  // namespace

std::string ReducerCore::describe_early_write(const Parameter& parameter) const {
  return context_.me() + "parameter '" + parameter.name +
         "' is updated inside backward (by a gradient hook), with this rank's own gradient instead "
         "of the average. Step after backward, or, to hide steps under communication, use "
         "OverlappedOptimizer or a bucket callback (register_bucket_callback)";
}

void ReducerCore::gradient_ready(size_t index, const at::Tensor& incoming) {
  const Change change(context_.monitor);
  const Parameter& parameter = context_.parameters[index];
  if (!context_.parameters.owns(parameter) ||
      (context_.parameters.retired() && !in_backward(phase_)))
    return;
  if (!in_backward(phase_) && !begin_at_gradient(index, incoming)) return;
  if (phase_ == Phase::kEnding) {
    throw Error(
        context_.me() + "parameter '" + parameter.name +
        "' got a gradient while another backward was ending: a bucket callback must not start one");
  }
  BackwardPass& pass = *pass_;
  GradientState& gradient = pass.gradients[index];
  step_.tracker.gradient_arrived(/*synchronized=*/true);
  if (overtaken_[index]) pass.fail(context_.me() + describe_overtaken(parameter.name));
  // Each rank has written something else, since each has its own gradient. An optimizer's fused
  // kernels do not move the version: refuse_step_in_backward().
  if (!context_.members.alone() && version_of(parameter.variable) != parameter.seen_version)
    pass.fail(describe_early_write(parameter));
  ++gradient.fired;
  // With views a gradient of this backward may be in its bucket already, and .grad be undefined.
  if (parameter.variable.grad().defined()) pass.used[index] = 1;
  if (gradient.stale && !context_.options.gradient_average) {
    pass.fail(
        context_.me() + "parameter '" + parameter.name +
        "' still held the gradient that the last synchronized backward summed over the ranks when "
        "this "
        "one began; with gradient_average=False what it added cannot be told apart, and the old "
        "sum was "
        "counted once per rank. Clear gradients (zero_grad) between synchronized backwards, or "
        "accumulate under no_sync().");
  }
  gradient.last_fired = ++pass.clock;
  context_.observers.tell(&BackwardObserver::gradient_ready, index);
  if (book_.current() != nullptr) count_down(index, incoming);
}

/// A gradient that did not come through a watched output: begins a backward, if it is to be
/// synchronized.
bool ReducerCore::begin_at_gradient(size_t index, const at::Tensor& incoming) {
  Parameter& parameter = context_.parameters[index];
  if (!synchronizing_.load()) {
    overtake_deferred();
    step_.tracker.gradient_arrived(/*synchronized=*/false);
    parameter.touch();
    if (overtaken_[index]) throw Error(context_.me() + describe_overtaken(parameter.name));
    return false;
  }
  choose_plan();
  begin_backward();
  // This gradient is there already; if it is the one that came in, this backward has made it.
  const at::Tensor& grad = parameter.variable.grad();
  if (grad.defined() && incoming.defined() && has_memory(grad) && has_memory(incoming) &&
      incoming.storage().is_alias_of(grad.storage())) {
    pass_->kept[index] = 0;
  }
  return true;
}

/// One gradient less that its bucket waits for.
void ReducerCore::count_down(size_t index, const at::Tensor& incoming) {
  const Parameter& parameter = context_.parameters[index];
  Plan& plan = *book_.current();
  const Place& place = plan.places[index];
  const int32_t fired = pass_->gradients[index].fired;
  if (place.bucket < 0) {
    if (context_.options.static_graph && !pass_->wants_rebuild) {
      pass_->fail(context_.me() + "parameter '" + parameter.name +
                  "' got a gradient, but had none on any rank in the first backward, and "
                  "static_graph=True promises that this does not change: its gradient was not "
                  "averaged. Construct without static_graph, or call relearn() on every rank "
                  "when the model changes.");
    }
    return;
  }
  PlannedBucket& entry = plan.entries[place.bucket];
  if (entry.launched) {
    pass_->fail(
        context_.me() + "parameter '" + parameter.name + "' got gradient number " +
        std::to_string(fired) + " of one backward after its bucket had been launched; " +
        std::to_string(place.expected) +
        " were recorded in the first backward, so the later ones are not averaged. A layer was "
        "probably used in more checkpointed segments than before: call relearn() on every rank "
        "when "
        "that changes, or construct with delay_allreduce=True.");
    return;
  }
  if (!parameter.device.is_cpu()) {
    const c10::Stream stream =
        c10::impl::VirtualGuardImpl(parameter.device.type()).getStream(parameter.device);
    auto& producers = entry.producers;
    if (std::find(producers.begin(), producers.end(), stream) == producers.end())
      producers.push_back(stream);
  }
  if (fired >= place.expected)
    entry.message.copy_early(place.slot, entry.averaging(context_).before);
  if (fired == place.expected) --entry.pending;
  launch_ready(incoming);
}

void ReducerCore::launch_ready(const at::Tensor& incoming) {
  if (context_.options.delay_allreduce || pass_->owes_end) return;
  Plan& plan = *book_.current();
  BackwardPass& pass = *pass_;
  // What this rank has unfrozen is reduced after that, so its part is not done before backward has
  // ended.
  const size_t end = plan.entries.size() - (plan.last_at_end || pass.wants_rebuild ? 1 : 0);
  while (pass.next_launch < end && plan.entries[pass.next_launch].pending == 0) {
    if (pass.next_launch > 0 && plan.entries[pass.next_launch - 1].reduction->holds_back_next())
      return;
    launch(pass.next_launch, incoming);
    context_.statistics.add(&ReducerStatistics::launched_in_backward);
  }
}

void ReducerCore::launch(size_t index, const at::Tensor& incoming) {
  PlannedBucket& entry = book_.current()->entries[index];
  pass_->next_launch = index + 1;  // first, so that a launch that throws is not tried again
  const bool tells = entry.message.trailer().carries_facts();
  const uint32_t facts = tells ? step_facts(!left_.empty()).encode() : 0;
  pass_->reported = pass_->reported || tells;
  try {
    launch_bucket(entry, index, *pass_, facts, incoming, context_);
  } catch (const CommunicationError&) {
    fail();  // at once: nothing may be sent any more
    throw;
  } catch (const Interrupted&) {  // in the hook; the others have heard
    fail();
    throw;
  } catch (...) {
    if (entry.user_code_failed) step_.set_hook_failed(entry.traits.fails_together);
    throw;
  }
}

}  // namespace apex::parallel::detail
