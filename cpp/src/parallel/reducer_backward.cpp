#include <algorithm>
#include <utility>

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "parallel/reducer_state.h"
#include "parallel/sparse_all_reduce.h"

namespace apex::parallel::detail {

// Note [The end of a backward]
//
// The reduction ends in a final callback of the autograd engine, so that gradients are complete when
// backward() returns. A final callback belongs to the graph task in which it was queued. Reentrant
// checkpointing runs segments of the model in inner graph tasks, and a callback queued by a gradient
// inside one would run before the outer backward is done. So it is queued from the first of our hooks
// that runs: normally the one on the model's outputs (watch_outputs), which runs in the outer task; a
// gradient's own hook queues it only where backward did not come through a watched output.
//
// The callback owns a BackwardScope. If backward fails the engine destroys its callbacks without
// running them, and the scope's destructor resets the reducer: there is no state to guess about in the
// next backward, whether or not there is one.
//
// Which reducers take part in a backward, see Note [One backward, all its reducers].
//
// An output's hook also runs for autograd.grad(), which computes gradients without accumulating any.
// The engine then has a list of what to execute, and a backward that leaves gradients has none; with
// backward(inputs=...), which has one too, the first gradient that is accumulated opens the scope.

// Note [Order of launches]
//
// Collectives of one process group must be issued in the same order on every rank, but gradients become
// ready in an order that may differ. So buckets have one order, the plan's, and a bucket is launched
// only when all before it were. Everything that launches runs under mutex_.

void ReducerState::prepare_backward() {
  if (options_.auto_buckets) begin_ = std::chrono::steady_clock::now();
  if (overlap_) time_begin();
  ++backwards_begun_;
  bool changed = false;
  bool touched_changed = false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const at::Tensor& grad = parameter.variable.grad();
    parameter.fired = 0;
    const bool owned = owns(parameter);
    if (owned) {
      const uint32_t version = parameter.variable._version();
      changed = changed || version != parameter.seen_version;
      touched_changed = touched_changed || (parameter.touched && version != parameter.touched_version);
      parameter.seen_version = version;
    }
    kept_[i] = grad.defined();
    // What accumulated without synchronization is part of this reduction.
    used_[i] = parameter.touched && owned && grad.defined();
    if (options_.gradient_average && !joining_) continue;
    const auto reduced = parameter.reduced.lock();
    parameter.stale = grad.defined() && reduced && reduced.get() == grad.unsafeGetTensorImpl() &&
                      grad._version() == parameter.reduced_version;
  }
  steps_.backward_began(changed, touched_changed);
}

void ReducerState::begin_backward() {
  if (groups_.empty()) {
    throw Error(
        "backward after the reducer let go of its process groups (release(), or the end of the "
        "interpreter): gradients would not be averaged");
  }
  if (broken_) {
    throw CommunicationError(
        "rank " + std::to_string(rank_) +
        ": a collective, or the communication hook of some ranks, failed in an earlier backward, so the messages "
        "of the ranks do not match any more: start again with a new process group and a new wrapper");
  }
  require_same_ranks(*parent_, rank_, world_size_, "this reducer");
  told_ = steps_compared_ = false;
  details_ = {};
  gives_up_.reset();
  companions_.clear();
  overtake_deferred();
  prepare_backward();
  if (joining_) {
    const bool kept = std::any_of(parameters_.begin(), parameters_.end(),
                                  [](const Parameter& parameter) { return parameter.stale; });
    exchange_event(true, JoinEvent::kBackward, kept);
  }
  auto scope = std::make_shared<BackwardScope>(shared_from_this());
  scope_ = scope.get();
  try {
    torch::autograd::Engine::get_default_engine().queue_callback([scope] { scope->end(); });
  } catch (...) {
    scope->dismiss();
    scope_ = nullptr;
    throw;
  }
}

void ReducerState::watch(const std::shared_ptr<const Output>& output) {
  const std::lock_guard<std::mutex> lock(outputs_mutex_);
  // Whoever holds many outputs does not have them looked through in every forward.
  if (outputs_.size() >= most_outputs_) {
    outputs_.erase(std::remove_if(outputs_.begin(), outputs_.end(),
                                  [](const auto& held) { return held.expired(); }),
                   outputs_.end());
    most_outputs_ = std::max<size_t>(16, 2 * outputs_.size());
  }
  outputs_.push_back(output);
}

/// Whether an output of this reducer is among the nodes of a backward, by which it counts as reached.
bool ReducerState::reach_outputs_in(const std::unordered_set<torch::autograd::Node*>& nodes) {
  // Not mutex_: another thread's backward may hold that while it waits for other ranks, which may wait for this one.
  const std::lock_guard<std::mutex> lock(outputs_mutex_);
  bool any = false;
  for (const auto& held : outputs_) {
    const auto output = held.lock();
    if (!output || nodes.count(output->node) == 0) continue;
    if (output->forward) output->forward->reached = true;
    any = true;
  }
  return any;
}

bool ReducerState::has_entered(int task) const {
  const Lock lock(mutex_);
  return entered_task_ == task;
}

/// An output of this reducer lies in the graph of `task`.
void ReducerState::output_reached(int task) {
  const Lock lock(mutex_);
  // A graph task is entered once, however many outputs it comes through.
  if (std::exchange(entered_task_, task) == task || scope_ != nullptr) return;
  if (!synchronizing_.load()) {
    overtake_deferred();
    announce_local_backward();
    return;
  }
  choose_plan();
  // All taken by another reducer: see Note [One parameter, one reducer].
  const bool owns_any = std::any_of(parameters_.begin(), parameters_.end(),
                                    [&](const Parameter& parameter) { return owns(parameter); });
  // Without a parameter in the plan, or one that may still get there, there is nothing to do. While
  // learning there may be: a frozen parameter's gradient, accumulated before, on another rank only.
  if (owns_any && (learning_ ? ever_trainable_ : !entries_.empty())) {
    begin_backward();
  } else {
    announce_local_backward();
  }
}

void ReducerState::announce_local_backward() {
  if (joining_) exchange_event(true, JoinEvent::kLocalBackward, 0);
}

void ReducerState::gradient_ready(size_t index, const at::Tensor& incoming) {
  const Lock lock(mutex_);
  Parameter& parameter = parameters_[index];
  if (!owns(parameter) || (retired_ && scope_ == nullptr)) return;
  if (scope_ == nullptr) {
    if (!synchronizing_.load()) {
      overtake_deferred();
      steps_.gradient_arrived(/*synchronized=*/false);
      parameter.touched = true;
      parameter.touched_version = parameter.variable._version();
      if (parameter.overtaken) throw Error(describe_overtaken(parameter));
      return;
    }
    choose_plan();
    begin_backward();
    steps_.reached_from_elsewhere();
    // This gradient is there already; if it is the one that came in, this backward has made it.
    const at::Tensor& grad = parameter.variable.grad();
    if (grad.defined() && incoming.defined() && grad.layout() == at::kStrided &&
        incoming.layout() == at::kStrided && incoming.storage().is_alias_of(grad.storage())) {
      kept_[index] = 0;
    }
  }
  steps_.gradient_arrived(/*synchronized=*/true);
  if (parameter.overtaken && deferred_error_.empty()) deferred_error_ = describe_overtaken(parameter);
  ++parameter.fired;
  // With views a gradient of this backward may be in its bucket already, and .grad be undefined.
  if (parameter.variable.grad().defined()) used_[index] = 1;
  if (parameter.stale && !options_.gradient_average && deferred_error_.empty()) {
    deferred_error_ =
        "rank " + std::to_string(rank_) + ": parameter '" + parameter.name +
        "' still held the gradient that the last synchronized backward summed over the ranks when this "
        "one began; with gradient_average=False what it added cannot be told apart, and the old sum was "
        "counted once per rank. Clear gradients (zero_grad) between synchronized backwards, or "
        "accumulate under no_sync().";
  }
  parameter.last_fired = ++clock_;
  if (overlap_) overlap_->gradient(index);
  if (learning_) return;
  if (parameter.bucket < 0) {
    if (options_.static_graph && !asks_to_relearn_ && deferred_error_.empty()) {
      deferred_error_ = "rank " + std::to_string(rank_) + ": parameter '" +
                        parameter.name +
                        "' got a gradient, but had none on any rank in the first backward, and "
                        "static_graph=True promises that this does not change: its gradient was not "
                        "averaged. Construct without static_graph, or call relearn() on every rank "
                        "when the model changes.";
    }
    return;
  }
  if (parameter.fired == parameter.expected) note_gradient(index);
  Entry& entry = entries_[parameter.bucket];
  if (entry.launched) {
    if (deferred_error_.empty()) {
      deferred_error_ =
          "rank " + std::to_string(rank_) + ": parameter '" + parameter.name +
          "' got gradient number " + std::to_string(parameter.fired) +
          " of one backward after its bucket had been sent; " + std::to_string(parameter.expected) +
          " were learnt in the first backward, so the later ones are not averaged. A layer was "
          "probably used in more checkpointed segments than before: call relearn() on every rank when "
          "that changes, or construct with delay_allreduce=True.";
    }
    return;
  }
  if (!parameter.device.is_cpu()) {
    const c10::Stream stream =
        c10::impl::VirtualGuardImpl(parameter.device.type()).getStream(parameter.device);
    auto& producers = entry.producers;
    if (std::find(producers.begin(), producers.end(), stream) == producers.end()) {
      producers.push_back(stream);
    }
  }
  if (parameter.fired >= parameter.expected) entry.bucket.copy_early(parameter.slot, scale_before(entry));
  if (parameter.fired == parameter.expected) --entry.pending;
  launch_ready(incoming);
}

bool ReducerState::waits_for_chain(size_t index) const {
  if (index == 0 || !comm_hook_ || !comm_hook_->may_chain()) return false;
  // By induction all before it are done, too.
  const auto& future = entries_[index - 1].future;
  return future && !future->completed();
}

void ReducerState::launch_ready(const at::Tensor& incoming) {
  if (options_.delay_allreduce) return;
  // What this rank has unfrozen is reduced after that, so its part is not done before backward has ended.
  const size_t end = entries_.size() - (last_at_end_ || asks_to_relearn_ ? 1 : 0);
  while (next_launch_ < end && entries_[next_launch_].pending == 0 &&
         !waits_for_chain(next_launch_)) {
    launch(next_launch_, incoming);
    ++statistics_.launched_in_backward;
  }
}

bool ReducerState::averages_itself(const Entry& entry) const {
  return entry.average_on_wire || (comm_hook_ && entry.goes_through_hook());
}

// The division rides on a pass that is made anyway: on the collective where the backend divides, else
// on the copy into the bucket. float16 and bfloat16 are divided after the sum, as Apex does: dividing
// first would push small gradients below their smallest number.
double ReducerState::scale_before(const Entry& entry) const {
  if (averages_itself(entry)) return 1.0;
  if (averages_first(entry)) return 1.0 / static_cast<double>(divisor());
  return 1.0 / options_.gradient_predivide_factor;
}

double ReducerState::scale_after(const Entry& entry) const {
  if (!options_.gradient_average) return 1.0;
  const auto ranks = static_cast<double>(divisor());
  if (averages_itself(entry)) return world_size_ / ranks;
  if (averages_first(entry)) return 1.0;
  return options_.gradient_predivide_factor / ranks;
}

bool ReducerState::averages_first(const Entry& entry) const {
  const at::ScalarType dtype = entry.bucket.wire_dtype();
  return options_.gradient_average && options_.gradient_predivide_factor == 1.0 &&
         (dtype == at::kFloat || dtype == at::kDouble);
}

void ReducerState::join_producers(Entry& entry) {
  const at::Device device = entry.bucket.device();
  if (device.is_cpu() || entry.producers.empty()) return;
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  bool foreign = false;
  for (const c10::Stream& producer : entry.producers) {
    if (producer == current) continue;
    foreign = true;
    // Recorded now, hence after every gradient that the producer has been asked for so far.
    c10::Event event(device.type());
    event.record(producer);
    event.block(current);
  }
  if (!foreign) return;
  for (const Bucket::Slot& slot : entry.bucket.slots()) {
    // The allocator must not reuse a gradient for its producer's stream while this one reads it.
    const at::Tensor& grad = slot.variable.grad();
    if (grad.defined()) grad.record_stream(current);
  }
}

std::string ReducerState::describe_bucket(size_t index) const {
  return describe_bucket(entries_, index, comm_hook_.get());
}

std::string ReducerState::describe_bucket(const std::vector<Entry>& entries, size_t index, const CommHook* hook) const {
  const Entry& entry = entries[index];
  const auto& slots = entry.bucket.slots();
  const bool hooked = hook != nullptr && entry.goes_through_hook();
  std::string text = hooked ? "communication hook '" + hook->name() + "', for bucket " : "all-reduce of bucket ";
  text += std::to_string(index);
  const std::string backward = ", of backward number " + std::to_string(statistics_.backwards + 1);
  if (slots.empty()) return text + " (used-parameter mask)" + backward;
  text += " (parameter '" + parameters_[slots.front().parameter].name + "'";
  if (slots.size() > 1) {
    text += " to '" + parameters_[slots.back().parameter].name + "', " +
            std::to_string(slots.size()) + " parameters";
  }
  return text + ", " + std::to_string(entry.bucket.data_numel()) + " elements)" + backward;
}

void ReducerState::launch(size_t index, const at::Tensor& incoming) {
  const ProfilerRange range("apex::reducer::launch_bucket");
  Entry& entry = entries_[index];
  // First, so that a launch that throws is not tried again.
  entry.launched = true;
  next_launch_ = index + 1;
  const c10::OptionalDeviceGuard guard(entry.bucket.device());
  join_producers(entry);
  const bool hooked = comm_hook_ && entry.goes_through_hook();
  const uint32_t facts = entry.bucket.carries_facts() ? facts_of_step().encode() : 0;
  entry.bucket.pack(used_, scale_before(entry), facts, incoming);
  if (options_.check_finite) entry.largest = entry.bucket.largest_values();
  statistics_.gradients_copied += entry.bucket.copied();
  statistics_.gradients_copied_early += entry.bucket.copied_early();
  if (entry.bucket.kind() == Bucket::Kind::kInPlace && entry.bucket.copied() == 0) {
    ++statistics_.reduced_in_place;
  }
  if (hooked) {
    GradientBucket& view = entry.hooked;
    view = {};
    view.index = static_cast<int64_t>(index);
    view.is_last = index == last_hooked_;
    view.buffer = entry.bucket.data();
    view.gradients = entry.bucket.data_views();
    for (const Bucket::Slot& slot : entry.bucket.slots()) view.parameters.push_back(slot.variable);
    if (overlap_) time_launch(index);
    hook_failed_ = true;  // unless it returns
    entry.future = comm_hook_->run(view);
    if (!entry.future) {
      throw Error("rank " + std::to_string(rank_) + ": the communication hook '" + comm_hook_->name() +
                  "' returned no future for bucket " + std::to_string(index) +
                  ", so its gradients would not be averaged: return one that yields the result");
    }
    hook_failed_ = false;
    if (overlap_) overlap_->in_flight(index, entry.future);
    return;
  }
  if (entry.bucket.kind() == Bucket::Kind::kSparse) return;  // see await()
  if (overlap_) time_launch(index);
  if (world_size_ == 1) {
    // The sum is there already, and handing a message to a backend costs more than the rest of a step does.
    if (overlap_) overlap_->arrived_at_once(index);
    return;
  }
  const GroupPtr& group = group_of(index);
  c10d::AllreduceOptions options;
  options.reduceOp = entry.average_on_wire ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
  std::vector<at::Tensor> message{entry.bucket.message()};
  entry.work = call_collective(describe_bucket(index), *group,
                               [&] { return group->allreduce(message, options); });
  if (overlap_) overlap_->in_flight(index, entry.work);
}

}  // namespace apex::parallel::detail
