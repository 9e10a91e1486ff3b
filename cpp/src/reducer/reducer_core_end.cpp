// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/Functions.h>

#include <apex/error.h>

#include "fingerprint.h"
#include "reducer/profiler_range.h"
#include "reducer/reducer_core.h"

namespace apex::parallel::detail {

// Note [Backwards that end before their buckets have arrived]
//
// A step can take no less than its forward and then the longer of backward and communication, as
// long as backward waits for the last bucket. It need not: the next forward can begin, and wait for
// each parameter when it comes to it. Then what matters is that the buckets of the first layers
// arrive first, although their gradients are the last to be computed. (Y. Peng et al., "A Generic
// Communication Scheduler for Distributed DNN Training Acceleration", SOSP 2019; A. Jayarajan et
// al., "Priority-based Parameter Propagation for Distributed DNN Training", MLSys 2019.)
//
// Ranks have to launch in one order, so priorities that depend on what is ready are out. But a
// fixed order does: what has arrived by the end of backward stays where it is, and so does the
// bucket that is on the network then; the others are still waiting for the network, and are
// launched in the order in which the next forward asks for them, the reverse of that in which
// backward made them. How many have arrived is what rank 0 sees in the third backward with a plan.
// A plan that was given is not reordered.
//
// In between, gradients are neither complete nor free to be added to. Whatever needs them completes
// the deferred backward first: the next backward (at its first output), a change of plan, hook or
// callback. A parameter that gets a gradient although nobody has waited for its last one was used
// in forward before it was updated: that is an error.

namespace {

constexpr int64_t kOrderAfter = 3;

constexpr const char* kSkippedTooLate =
    "another rank called skip_step() in this backward, but here a bucket callback or an "
    "OverlappedOptimizer had the gradients before that was known, so parameters may differ: use "
    "the same on every rank, and start again from a checkpoint";

/// Whether two plans hold the same parameters.
bool holds_same(const BucketPlan& left, const BucketPlan& right) {
  const auto members = [](const BucketPlan& plan) {
    std::vector<int64_t> all;
    for (const auto& bucket : plan.buckets) all.insert(all.end(), bucket.begin(), bucket.end());
    std::sort(all.begin(), all.end());
    return all;
  };
  return members(left) == members(right);
}

}  // namespace

void ReducerCore::finish(BackwardScope* scope) {
  const Change change(context_.monitor);
  if (scope_ != scope) return;
  const ProfilerRange range("apex::reducer::finish_backward");
  or_skip([&] { end_backward(); });
}

void ReducerCore::end_backward() {
  const size_t done = done_in_order();
  enter(Phase::kEnding);
  or_drop([&] {
    announce_end();
    if (!left_.empty()) carry_left_plan();
    if (book_.current() == nullptr) agree_on_plan();
    launch_rest();
  });
  ++book_.current()->backwards;
  book_.current()->holds_gradients = true;
  if (may_defer()) {
    for (PlannedBucket& entry : book_.current()->entries) entry.reduction->leave();
    scope_ = nullptr;
    forward_since_ = false;
    enter(Phase::kDeferred);
    context_.statistics.add(&ReducerStatistics::deferred);
    context_.observers.tell(&BackwardObserver::deferred);
    return;
  }
  complete(done);
}

/// Until then ranks without data take part in what modules announce.
void ReducerCore::announce_end() {
  if (pass_->owes_end) join_event(true, JoinEvent::kBackwardEnd, 0);
  pass_->owes_end = false;
}

void ReducerCore::launch_rest() {
  auto& entries = book_.current()->entries;
  while (pass_->next_launch < entries.size()) {
    const size_t next = pass_->next_launch;
    if (next > 0) let_next_pass(entries[next - 1], next - 1, context_);
    launch(next);
    context_.statistics.add(&ReducerStatistics::launched_at_end);
  }
}

/// What this rank has seen in this backward.
Recording ReducerCore::recording(const StepFacts& facts) const {
  const ParameterTable& parameters = context_.parameters;
  Recording mine;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& grad = parameters[i].variable.grad();
    RecordedParameter seen;
    seen.used = pass_->used[i] != 0;
    const bool sparse = seen.used && grad.defined() && grad.layout() == at::kSparse;
    seen.sparse_dim = sparse ? static_cast<int32_t>(grad.sparse_dim()) : 0;
    seen.in_parts = seen.used && is_in_parts(grad, parameters[i].variable);
    seen.fired = pass_->gradients[i].fired;
    seen.trainable = parameters.trains(i);
    mine.parameters.push_back(seen);
    if (seen.fired > 0) mine.ready_order.push_back(static_cast<int64_t>(i));
  }
  if (!context_.options.delay_allreduce) {
    std::sort(mine.ready_order.begin(), mine.ready_order.end(), [&](int64_t left, int64_t right) {
      return pass_->gradients[left].last_fired < pass_->gradients[right].last_fired;
    });
  }
  mine.facts = facts.encode();
  Fingerprint kinds;  // they decide on the sizes of messages
  for (const Parameter& parameter : parameters) {
    kinds.add(&parameter.dtype, sizeof(parameter.dtype));
    kinds.add(parameter.sizes.data(), parameter.sizes.size() * sizeof(int64_t));
  }
  mine.settings = describe_settings() + ' ' + std::to_string(kinds.value());
  return mine;
}

/// After this, there is a plan, the same on every rank.
void ReducerCore::agree_on_plan() {
  const ParameterTable& parameters = context_.parameters;
  const Recording mine = recording(step_facts(!left_.empty()));
  const AgreedRecording agreed =
      parameters.empty()
          ? AgreedRecording()
          : context_.monitor.open([&] { return PlanExchange(context_.members, mine).wait(); });
  std::vector<Place> places(parameters.size());
  for (size_t i = 0; i < places.size(); ++i) {
    const RecordedParameter& seen = agreed.parameters[i];
    pass_->used_by_any[i] = seen.used;
    places[i].sparse = seen.sparse_dim != 0;
    places[i].sparse_dim = seen.sparse_dim;
    places[i].in_parts = seen.used ? seen.in_parts : may_be_in_parts(parameters[i].variable);
    places[i].trainable_here = mine.parameters[i].trainable;
    places[i].trainable_anywhere = seen.trainable;
    // A rank goes by its own count; one that has none yet, by that of the others.
    places[i].expected =
        std::max<int32_t>(1, mine.parameters[i].fired > 0 ? mine.parameters[i].fired : seen.fired);
  }
  if (!parameters.empty()) {
    const SeenFacts seen(agreed.facts);
    context_.monitor.open([&] { step_.refuse_failed_step(seen); });
    if (!agreed.same_settings) step_.refuse_settings(describe_settings());
    if (context_.options.check_steps.value_or(context_.members.control_device().is_cpu())) {
      std::vector<bool> anywhere;
      for (const Place& place : places) anywhere.push_back(place.trainable_anywhere);
      const std::string error =
          context_.monitor.open([&] { return step_.compare(seen, anywhere); });
      if (pass_->out_of_step.empty()) pass_->out_of_step = error;
    }
  }
  // Frozen after it accumulated a local gradient: reduced now, and not waited for in later steps.
  const auto& ready = agreed.ready_order;
  book_.serves_once = std::any_of(ready.begin(), ready.end(),
                                  [&](int64_t i) { return !places[i].trainable_anywhere; });
  context_.statistics.add(&ReducerStatistics::plans_learnt);
  pass_->wants_rebuild = false;
  if (book_.take_agreed(places, ready)) return;

  BucketLimits limits = context_.options.limits;
  if (context_.options.delay_allreduce)
    limits.cap = limits.first_cap = std::numeric_limits<int64_t>::max();
  Plan& plan = *book_.current();
  plan.buckets = assign_buckets(parameter_infos(context_, places), ready, limits,
                                context_.options.trigger_parameters);
  plan.preset = holds_same(preset_, plan.buckets);
  if (plan.preset) plan.buckets = preset_;
  build_entries(plan, context_);
}

bool ReducerCore::may_defer() const {
  const Plan& plan = *book_.current();
  if (!context_.defers || context_.joining || book_.serves_once || plan.watches_unplanned ||
      context_.options.check_finite || context_.options.check_steps.value_or(false) ||
      plan.backwards <= kOrderAfter || !pass_->error.empty()) {
    return false;
  }
  // Members that this rank has not used are settled when all masks are there.
  return std::none_of(plan.entries.begin(), plan.entries.end(), [](const PlannedBucket& entry) {
    return entry.message.has_unused() || entry.reduction->has_next_phase();
  });
}

/// At the end of a backward: how many buckets have arrived, if this is the backward that decides on
/// the order; asking may mean asking a device, so no other does.
size_t ReducerCore::done_in_order() const {
  const Plan* plan = book_.current();
  if (plan == nullptr || !context_.defers || plan->backwards + 1 != kOrderAfter) return 0;
  size_t done = 0;
  while (done < plan->entries.size() && plan->entries[done].reduction->done()) ++done;
  return done;
}

void ReducerCore::order_by_need(size_t done) {
  const Plan& plan = *book_.current();
  if (!context_.defers || plan.preset || plan.backwards != kOrderAfter) return;
  BucketPlan ordered = plan.buckets;
  // One more is on the network.
  const size_t stay = std::min(done + 1, ordered.buckets.size());
  std::reverse(ordered.buckets.begin() + static_cast<int64_t>(stay), ordered.buckets.end());
  const auto count = static_cast<int64_t>(context_.parameters.size());
  adopt(context_.monitor.open([&] { return broadcast_plans(context_.members, {ordered}, count); })
            .front());
}

void ReducerCore::complete(size_t done) {
  if (phase_ == Phase::kDeferred) enter(Phase::kEnding);
  or_drop([&] {
    Plan* plan = book_.current();
    // A rank that failed takes part in no further exchange, so its failure has to be known before
    // the first. A bucket callback, however, is to be called as soon as its bucket is there.
    const auto refuse = [&](const SeenFacts& seen) {
      if (must_refuse(seen)) --plan->backwards;  // counted by no rank, since not by the failed ones
      context_.monitor.open([&] { step_.refuse_failed_step(seen); });
      pass_->skipped = pass_->skipped || seen.skipped() || wants_skip_;
    };
    const ReducerOptions& options = context_.options;
    if (!callback_ || options.check_finite || options.skip_failed_steps ||
        plan->has_later_messages())
      refuse(await_facts(plan->entries));
    run_next_phases(*plan, context_);
    if (options.check_finite && !context_.parameters.empty()) {
      pass_->non_finite = find_non_finite(plan->entries, context_);
      pass_->skipped = pass_->skipped || (options.skip_failed_steps && !pass_->non_finite.empty());
    }
    const std::vector<size_t> unsettled = complete_entries();
    const SeenFacts seen = await_facts(plan->entries);
    refuse(seen);
    if (pass_->skipped && (callback_ || context_.defers) && !options.skip_failed_steps)
      pass_->fail(context_.me() + kSkippedTooLate);
    std::vector<std::vector<BucketMessage::Slot>> slots;
    for (const size_t index : unsettled) slots.push_back(plan->entries[index].message.slots());
    settle();
    for (size_t i = 0; i < unsettled.size(); ++i)
      call_back(static_cast<int64_t>(unsettled[i]), slots[i], false);
    context_.observers.tell(&BackwardObserver::completed);
    agree_on_what_follows(seen, done);
    plan = book_.current();
    if (context_.options.gradient_as_bucket_view && !plan->holds_gradients && !pass_->failure)
      move_gradients_in(*plan, context_);
  });
  if (pass_->failure) {
    const std::exception_ptr failure = pass_->failure;
    drop_messages();
    close_book();
    std::rethrow_exception(failure);
  }
  if (pass_->skipped) call_off();
  for (Parameter& parameter : context_.parameters) parameter.touched = false;
  remember_reduced();
  sample_parameters();
  const BackwardPass ended = std::move(*pass_);
  // Ranks without a gradient in it recorded nothing that later steps could go by.
  const bool recorded = book_.current() != nullptr && book_.current()->backwards <= 1;
  end_pass();
  close_book();
  if (ended.skipped && recorded) book_.forget();
  context_.statistics.add(&ReducerStatistics::backwards);
  if (!ended.out_of_step.empty()) companions_.tell();
  ended.rethrow();
}

/// The exchanges behind the last message of a backward. Every rank whose messages were sent takes
/// part in them, also one whose backward has failed since.
void ReducerCore::agree_on_what_follows(const SeenFacts& seen, size_t done) {
  compare_steps(seen);
  if (seen.rebuild_wanted()) rebuild_now();
  order_by_need(done);
}

/// The backward has ended; plans are kept or forgotten as on the other ranks.
void ReducerCore::close_book() {
  book_.came();
  if (book_.serves_once) book_.forget();
}

void ReducerCore::complete_entry(size_t index) {
  PlannedBucket& entry = book_.current()->entries[index];
  try {
    awaiting([&](const std::function<void()>& meanwhile) {
      await_bucket(entry, index, meanwhile, context_);
    });
  } catch (const CommunicationError&) {
    // What failed here before says why, not that the others have not come since.
    if (pass_->failure) std::rethrow_exception(pass_->failure);
    throw;
  }
  entry.completed = true;
  if (pass_->failure) return;
  try {
    hand_out_bucket(entry, *pass_, context_);
  } catch (...) {
    // Of this rank alone, while exchanges may follow: see Note [Carried through].
    pass_->failure = std::current_exception();
    return;
  }
  const bool is_bucket = index < book_.current()->buckets.buckets.size();
  if (is_bucket && !entry.message.has_unused())
    call_back(static_cast<int64_t>(index), entry.message.slots(), true);
}

/// Completes all entries that are not. Returns those with parameters that this rank did not use, if
/// somebody is to be called back for them.
std::vector<size_t> ReducerCore::complete_entries() {
  std::vector<size_t> unsettled;
  const Plan& plan = *book_.current();
  for (size_t b = 0; b < plan.entries.size(); ++b) {
    if (plan.entries[b].completed) continue;  // while the rest was deferred
    complete_entry(b);
    if (callback_ && plan.entries[b].message.has_unused()) unsettled.push_back(b);
  }
  return unsettled;
}

/// Calls the bucket callback. What it throws is thrown when the other ranks have been served.
void ReducerCore::call_back(int64_t bucket, const std::vector<BucketMessage::Slot>& slots,
                            bool all_used) {
  if (!callback_ || pass_->callback_error || pass_->failure || pass_->skipped) return;
  ReducedBucket reduced;
  reduced.index = bucket;
  for (const BucketMessage::Slot& slot : slots) {
    if (all_used || pass_->used_by_any[slot.parameter])
      reduced.parameters.push_back(slot.parameter);
  }
  if (reduced.parameters.empty()) return;
  try {
    context_.monitor.open([&] { callback_(reduced); });
  } catch (...) {
    pass_->callback_error = std::current_exception();
  }
}

/// Decides for gradients that this rank does not have: from what the masks say.
void ReducerCore::settle() {
  Plan& plan = *book_.current();
  const bool missed =
      std::any_of(plan.entries.begin(), plan.entries.end(),
                  [](const PlannedBucket& entry) { return entry.message.has_unused(); });
  if (!missed && !plan.watches_unplanned) return;
  std::vector<uint8_t>& used_by_any = pass_->used_by_any;
  used_by_any = pass_->used;
  std::vector<const BucketTrailer*> trailers;
  std::vector<at::Tensor> sums;
  for (const PlannedBucket& entry : plan.entries) {
    const bool last = &entry == &plan.entries.back();
    if (entry.message.trailer().reported().empty() || !(missed || last)) continue;
    trailers.push_back(&entry.message.trailer());
    sums.push_back(entry.message.reduced_trailer());
  }
  context_.statistics.add(&ReducerStatistics::usage_reads,
                          BucketTrailer::read_used(trailers, sums, used_by_any));
  if (!pass_->failure) {
    for (PlannedBucket& entry : plan.entries) entry.message.settle(used_by_any);
  }
  if (!plan.watches_unplanned) return;
  std::vector<int64_t> late;
  for (size_t i = 0; i < plan.places.size(); ++i) {
    // One that was unfrozen since is not reported; the other ranks will hear of it in
    // rebuild_now().
    const bool reported = plan.places[i].bucket < 0 && plan.places[i].trainable_anywhere;
    if (reported && used_by_any[i]) late.push_back(static_cast<int64_t>(i));
  }
  if (late.empty()) return;
  // Every rank has read the same numbers, so every rank comes here with the same list, and extends
  // its plan alike.
  reduce_late_and_call_back(late);
  const BucketPlan more =
      assign_buckets(parameter_infos(context_, plan.places), late, context_.options.limits);
  plan.buckets.buckets.insert(plan.buckets.buckets.end(), more.buckets.begin(), more.buckets.end());
  build_entries(plan, context_);
  plan.backwards = 0;
  plan.preset = false;
  context_.statistics.add(&ReducerStatistics::plans_extended);
}

void ReducerCore::reduce_late_and_call_back(const std::vector<int64_t>& late) {
  reduce_late(
      late, book_.current()->places, *pass_,
      [this](const auto& slots) {
        find_non_finite_sum(slots);
        call_back(-1, slots, true);
      },
      context_);
}

/// With check_finite, of late gradients: in their sums, which are the same on every rank.
void ReducerCore::find_non_finite_sum(const std::vector<BucketMessage::Slot>& slots) {
  if (!context_.options.check_finite || !pass_->non_finite.empty()) return;
  for (const BucketMessage::Slot& slot : slots) {
    at::Tensor grad = slot.variable.grad();
    if (grad.defined() && grad.layout() == at::kSparse) grad = grad._values();
    if (!grad.defined() || at::isfinite(grad).all().item<bool>()) continue;
    pass_->non_finite = "a rank contributed a gradient that is infinite or NaN for parameter '" +
                        context_.parameters[slot.parameter].name +
                        "', and so it is on every rank now: look at the ranks' batches and losses, "
                        "lower the learning rate, or scale the loss; do not step the optimizer";
    pass_->skipped = pass_->skipped || context_.options.skip_failed_steps;
    return;
  }
}

/// Parameters were frozen or unfrozen on some rank: agrees on a new plan, and reduces what the old
/// one had no room for.
void ReducerCore::rebuild_now() {
  std::vector<bool> reduced;
  for (const Place& place : book_.current()->places) reduced.push_back(place.bucket >= 0);
  agree_on_plan();
  const std::vector<Place>& places = book_.current()->places;
  std::vector<int64_t> late;
  for (size_t i = 0; i < places.size(); ++i) {
    // A kept plan may hold parameters that no rank has used in this backward.
    if (places[i].bucket >= 0 && !reduced[i] && pass_->used_by_any[i])
      late.push_back(static_cast<int64_t>(i));
  }
  reduce_late_and_call_back(late);
}

std::vector<bool> ReducerCore::trainable_anywhere() const {
  std::vector<bool> anywhere;
  for (const Place& place : book_.current()->places) anywhere.push_back(place.trainable_anywhere);
  return anywhere;
}

/// Notes the error, to be thrown on every rank, if ranks are out of step.
void ReducerCore::compare_steps(const SeenFacts& seen) {
  if (step_.compared()) return;
  const std::vector<bool> trainable = trainable_anywhere();
  const std::string error = context_.monitor.open([&] { return step_.compare(seen, trainable); });
  if (pass_->out_of_step.empty()) pass_->out_of_step = error;
}

void ReducerCore::compare_early() {
  if (context_.monitor.is_taken()) return;
  const Change change(context_.monitor);
  const Plan* plan = book_.current();
  if (phase_ != Phase::kRunning || plan == nullptr || !left_.empty() || !plan->carries_facts() ||
      step_.compared()) {
    return;
  }
  // Other exchanges may come first, and a callback may step an optimizer, which changes what is
  // compared.
  if (plan->last_at_end || callback_) return;
  const PlannedBucket& last = plan->entries.back();
  try {
    std::optional<SeenFacts> seen;
    if (!step_.comparing() && last.launched && last.reduction->done()) {
      seen = SeenFacts(last.message.read_facts(last.sent()));
    }
    const std::string error = step_.compare_early(seen, trainable_anywhere());
    if (pass_->out_of_step.empty()) pass_->out_of_step = error;
  } catch (const CommunicationError&) {
    // It will be found where it is waited for.
  }
}

std::string ReducerCore::out_of_step() const {
  const Read read(context_.monitor);
  return pass_ ? pass_->out_of_step : std::string();
}

void ReducerCore::give_up_soon() {
  if (context_.monitor.is_taken()) return;
  const Change change(context_.monitor);
  companions_.give_up_soon();
}

void ReducerCore::remember_reduced() {
  const Plan* plan = book_.current();
  if ((context_.options.gradient_average && !context_.joining) || plan == nullptr) return;
  for (size_t i = 0; i < plan->places.size(); ++i) {
    Parameter& parameter = context_.parameters[i];
    const at::Tensor& grad = parameter.variable.grad();
    if (!grad.defined() || plan->places[i].bucket < 0) continue;
    parameter.reduced =
        c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(grad.getIntrusivePtr());
    parameter.reduced_version = grad._version();
  }
}

/// After the first backward with a plan, which is the same one on every rank.
void ReducerCore::sample_parameters() {
  const Plan* plan = book_.current();
  if (plan == nullptr || plan->number == step_.tracker.sampled_plan() || context_.members.alone() ||
      !context_.options.check_steps.value_or(true)) {
    return;
  }
  std::vector<at::Tensor> parameters;
  for (const auto& bucket : plan->buckets.buckets) {
    for (const int64_t index : bucket) parameters.push_back(context_.parameters[index].variable);
  }
  step_.tracker.sample(plan->number, parameters);
}

void ReducerCore::end_pass() {
  if (Plan* plan = book_.current()) plan->reset();
  std::fill(overtaken_.begin(), overtaken_.end(), 0);
  pass_.reset();
  scope_ = nullptr;
  wants_skip_ = false;
  if (phase_ != Phase::kFailed) enter(Phase::kIdle);
}

}  // namespace apex::parallel::detail
