#include <algorithm>
#include <utility>

#include <apex/error.h>

#include "parallel/reducer_state.h"

namespace apex::parallel::detail {

// Note [Backwards that end before their buckets have arrived]
//
// A step can take no less than its forward and then the longer of backward and communication, as long as
// backward waits for the last bucket. It need not: the next forward can begin, and wait for each parameter
// when it comes to it. Then what matters is that the buckets of the first layers arrive first, although
// their gradients are the last to be computed. (Y. Peng et al., "A Generic Communication Scheduler for
// Distributed DNN Training Acceleration", SOSP 2019; A. Jayarajan et al., "Priority-based Parameter
// Propagation for Distributed DNN Training", MLSys 2019.)
//
// Ranks have to launch in one order, so priorities that depend on what is ready are out. But a fixed order
// does: what has arrived by the end of backward stays where it is, and so does the bucket that is on the
// wire then; the others are still waiting for the wire, and are sent in the order in which the next forward
// asks for them, the reverse of that in which backward made them. How many have arrived is what rank 0 sees
// in the third backward with a plan. A plan that was given is not reordered.
//
// In between, gradients are neither complete nor free to be added to. Whatever needs them completes the
// deferred backward first: the next backward (at its first output), a change of plan, hook or callback. A
// parameter that gets a gradient although nobody has waited for its last one was used in forward before
// it was updated: that is an error.

namespace {

constexpr int64_t kOrderAfter = 3;

}  // namespace

bool ReducerState::may_defer() const {
  if (!defers_ || learning_ || joining_ || plan_for_once_ || watches_unplanned_ || options_.check_finite ||
      options_.check_steps.value_or(false) || backwards_with_plan_ <= kOrderAfter || !deferred_error_.empty()) {
    return false;
  }
  if (options_.auto_buckets && world_size_ > 1 && tuner_.phase() != BucketTuner::Phase::kKeep) return false;
  // Members that this rank has not used are settled when all usage numbers are there.
  return std::none_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return entry.bucket.has_unused() ||
           (entry.future && comm_hook_ && comm_hook_->has_finish(entry.hooked));
  });
}

void ReducerState::wait_for(const std::vector<int64_t>& parameters) {
  for (const int64_t index : parameters) {
    if (index < 0 || static_cast<size_t>(index) >= parameters_.size()) {
      throw InvalidArgument("wait_for(): parameter " + std::to_string(index) + " is not one of the " +
                            std::to_string(parameters_.size()) + " parameters");
    }
    if (!in_flight_) return;
    const int64_t bucket = parameters_[index].bucket;
    if (bucket < 0 || entries_[bucket].completed) continue;
    or_drop_messages([&] { complete_bucket(static_cast<size_t>(bucket)); });
    if (callback_error_) std::rethrow_exception(std::exchange(callback_error_, nullptr));
  }
  if (!in_flight_) return;
  const auto end = entries_.begin() + static_cast<int64_t>(plan_.buckets.size());
  if (std::all_of(entries_.begin(), end, [](const Entry& entry) { return entry.completed; })) {
    complete_deferred();
  }
}

void ReducerState::complete_deferred() {
  if (in_flight_) complete(/*learnt_now=*/false);
}

std::vector<int64_t> ReducerState::parameters_in_flight() const {
  std::vector<int64_t> waiting;
  if (!in_flight_) return waiting;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int64_t bucket = parameters_[i].bucket;
    if (bucket >= 0 && !entries_[bucket].completed) waiting.push_back(static_cast<int64_t>(i));
  }
  return waiting;
}

/// Before a backward: completes the last one, and notes which parameters nobody has waited for.
void ReducerState::overtake_deferred() {
  const std::vector<int64_t> overtaken = parameters_in_flight();
  complete_deferred();
  for (const int64_t i : overtaken) parameters_[i].overtaken = true;
}

std::string ReducerState::describe_overtaken(const Parameter& parameter) const {
  return "rank " + std::to_string(rank_) + ": parameter '" + parameter.name +
         "' got a gradient, but forward used it without waiting for its last one, so before it was updated "
         "(it is not used through the forward of the module that owns it). Wait for it first, see "
         "OverlappedOptimizer.synchronize() or Reducer::wait_for(), or do without overlapping.";
}

/// At the end of a backward: how many buckets have arrived, if this is the backward that decides on the
/// order; asking may mean asking a device, so no other does.
size_t ReducerState::arrived_in_order() const {
  size_t arrived = 0;
  if (!defers_ || backwards_with_plan_ + 1 != kOrderAfter) return arrived;
  for (const Entry& entry : entries_) {
    const bool done = (entry.work && entry.work->isCompleted()) || (entry.future && entry.future->completed());
    if (!done) break;
    ++arrived;
  }
  return arrived;
}

void ReducerState::send_first_needed_first(size_t arrived) {
  if (!defers_ || learning_ || preset_in_force_ || world_size_ == 1) return;
  if (backwards_with_plan_ != kOrderAfter) return;
  BucketPlan plan = plan_;
  // One more is on the wire.
  const size_t stay = std::min(arrived + 1, plan.buckets.size());
  std::reverse(plan.buckets.begin() + static_cast<int64_t>(stay), plan.buckets.end());
  adopt(broadcast_plans({plan}).front());
}

}  // namespace apex::parallel::detail
