// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <utility>

#include <apex/error.h>

#include "reducer/reducer_core.h"

namespace apex::parallel::detail {

// Note [Carried through]
//
// Ranks that have begun a synchronized backward wait for each other's buckets. A rank that cannot
// send its own, or does not want to, may therefore not just stay away: the messages of its next
// backward would meet those that the others still wait for, of other sizes. So a backward that was
// begun is carried through on every rank, with zeros where a rank has nothing to send, and facts in
// the last message that tell why:
//
// - it failed: an exception ended its backward, in the module, in a hook, or in a callback. Then
//   nothing of this backward counts: every rank throws, and all can go on with the next backward;
// - it left the plan (relearn(), another communication hook ...), which may well have happened on
//   all ranks: then all make a new plan and reduce their gradients by that. If some have kept the
//   plan, every rank throws.
//
// Whoever reads such a fact exchanges details with the others, in which all ranks take part, also
// those that sent it: without waiting for the answer, since they may be in a destructor. They have
// no more to say; so nobody may expect them in another exchange of that backward.
//
// A rank whose messages were all launched when it failed has done its part, and the others have
// their average. But the facts in these messages may lead to exchanges, in which it takes part like
// everybody (agree_on_what_follows()); the exception is thrown after that. If it fails in such an
// exchange, or in user code that comes between two (a hook's next phase), nobody knows what the
// others have received: that is the end of this reducer.

// Note [Skipped steps]
//
// skip_step() is one more fact: the backward is carried through as always, with the gradients that
// this rank has or without any, and when its facts are read every rank drops the gradients. They
// are set to None on every rank, so that an optimizer finds nothing to step, whether or not the
// loop asks. Sums that hold this step's gradients cannot be undone otherwise; what accumulated
// before under no_sync() belongs to the same step.
//
// With skip_failed_steps a failed backward ends in the same way: the ranks that read of it exchange
// details, as they would to raise, and skip instead. A failure must not come after the facts that
// say whether there is one; so the last bucket is launched when backward has ended.

namespace {

constexpr const char* kLeftPlan = "exchange by the plan that was left";

}  // namespace

/// Takes part in a backward by the plan that this rank has left, and lets go of it if all ranks
/// have left it.
void ReducerCore::carry_left_plan() {
  const StepFacts facts = step_facts(/*left_plan=*/true);
  launch_left(facts);
  try {
    const SeenFacts seen = await_facts(left_);
    context_.monitor.open([&] {
      step_.refuse_failed_step(seen);
      // Of the plan's other messages nothing is wanted, but that they do not come in the way of the
      // next.
      for (PlannedBucket& entry : left_) entry.reduction->wait(kLeftPlan, {});
    });
  } catch (const CommunicationError&) {
    throw;
  } catch (...) {
    for (PlannedBucket& entry : left_) entry.launched = false;
    throw;
  }
  left_.clear();
  step_.set_reason(ReasonToLeave::kNone);
}

void ReducerCore::launch_left(const StepFacts& facts) {
  try {
    launch_absent(left_, facts, step_.hook_failed(), context_);
  } catch (const CommunicationError&) {
    throw;
  } catch (...) {
    // A hook that fails may be why the plan was left: what it says of this one matters to nobody.
    launch_absent(left_, facts, /*without_user_code=*/true, context_);
  }
}

/// Waits for the message that carries facts, and reads them.
SeenFacts ReducerCore::await_facts(std::vector<PlannedBucket>& entries) {
  if (entries.empty() || !entries.back().message.trailer().carries_facts()) return SeenFacts(0);
  PlannedBucket& last = entries.back();
  const std::string what =
      &entries == &left_ ? kLeftPlan : describe_bucket(last, entries.size() - 1, context_);
  awaiting([&](const std::function<void()>& meanwhile) {
    context_.monitor.open([&] { last.reduction->wait(what, meanwhile); });
  });
  return SeenFacts(last.message.read_facts(last.sent()));
}

/// Waits for messages of this backward, looking after its companions.
void ReducerCore::awaiting(const std::function<void(const std::function<void()>&)>& body) {
  if (companions_.empty()) {
    body({});
    return;
  }
  try {
    body([this] { companions_.look(); });
  } catch (const CommunicationError&) {
    fail();
    const std::string error = companions_.error();
    if (!error.empty()) throw RankMismatch(error);  // the rank that has found out has ended
    throw;
  } catch (const RankMismatch&) {  // of look()
    fail();
    throw;
  }
}

/// Runs a part of the end of a backward; if it throws, the other ranks are told, and nothing stays
/// in flight.
void ReducerCore::or_drop(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommunicationError&) {
    fail();
    drop_messages();
    throw;
  } catch (...) {
    if (step_.hooks_apart()) fail();
    if (const Plan* plan = book_.current()) {
      for (const PlannedBucket& entry : plan->entries) {
        if (entry.user_code_failed) step_.set_hook_failed(entry.traits.fails_together);
      }
    }
    if (!part_is_done()) {
      send_failure();
    } else if (!step_.told()) {
      fail();
    }
    drop_messages();
    call_off_failed();
    throw;
  }
}

/// Runs the end of a backward, which another rank's failure may call off.
void ReducerCore::or_skip(const std::function<void()>& body) {
  try {
    body();
  } catch (const StepSkipped&) {
    // Dropped, with all gradients.
  }
}

/// No gradient of this backward counts: see Note [Skipped steps].
void ReducerCore::call_off() {
  step_skipped_ = true;
  for (Parameter& parameter : context_.parameters) {
    if (!context_.parameters.owns(parameter)) continue;
    parameter.touched = false;
    parameter.variable.mutable_grad() = at::Tensor();
  }
  if (Plan* plan = book_.current()) plan->holds_gradients = false;
  if (pass_) pass_->non_finite.clear();
  step_.tracker.backward_skipped();
  context_.statistics.add(&ReducerStatistics::steps_skipped);
}

/// After a backward that was dropped: the other ranks skip the step, so this one does.
void ReducerCore::call_off_failed() {
  if (context_.options.skip_failed_steps && phase_ == Phase::kIdle) call_off();
}

void ReducerCore::drop_messages() noexcept {
  if (Plan* plan = book_.current()) {
    for (PlannedBucket& entry : plan->entries) {
      entry.reduction->drop();
      entry.message.abandon();
    }
    plan->holds_gradients = false;
  }
  context_.observers.tell(&BackwardObserver::dropped);
  end_pass();
}

/// All messages of this rank are on their way.
bool ReducerCore::part_is_done() const {
  const Plan* plan = book_.current();
  return plan != nullptr && left_.empty() && phase_ != Phase::kFailed && !step_.hook_failed() &&
         std::all_of(plan->entries.begin(), plan->entries.end(),
                     [](const PlannedBucket& entry) { return entry.launched; });
}

/// An exception has ended the backward of this rank: the others are told. Does not wait for them,
/// unless a communication hook does.
void ReducerCore::send_failure() noexcept {
  if (phase_ == Phase::kFailed || phase_ == Phase::kReleased || step_.told()) return;
  try {
    const StepFacts facts = StepAgreement::failure();
    Plan* plan = book_.current();
    bool heard = true;
    if (!left_.empty()) {
      launch_left(facts);
      for (PlannedBucket& entry : left_) entry.launched = false;  // to be carried again
    } else if (plan == nullptr) {
      PlanExchange(context_.members, recording(facts));
    } else {
      launch_absent(plan->entries, facts, step_.hook_failed(), context_);
      heard = plan->carries_facts();
    }
    if (heard) step_.send_failure();
  } catch (const CommunicationError&) {
    fail();
  } catch (...) {
    const Plan* plan = book_.current();
    const auto everywhere = [](const PlannedBucket& entry) {
      return entry.user_code_failed && entry.traits.fails_together;
    };
    if (plan != nullptr && std::any_of(plan->entries.begin(), plan->entries.end(), everywhere)) {
      step_.set_hook_failed(/*everywhere=*/true);
    } else {
      fail();
    }
  }
}

/// This rank failed in a backward when its part was done. Returns whether it counts, as it does
/// unless another rank failed before.
bool ReducerCore::follow_the_others() noexcept {
  try {
    const size_t done = done_in_order();
    const SeenFacts seen = await_facts(book_.current()->entries);
    if (must_refuse(seen)) {
      context_.monitor.open([&] { step_.attend_refusal(); });
      if (step_.hooks_apart()) fail();
      return false;
    }
    ++book_.current()->backwards;
    agree_on_what_follows(seen, done);
    return true;
  } catch (...) {
    fail();
    return false;
  }
}

void ReducerCore::abandon(BackwardScope* scope) noexcept {
  const Change change(context_.monitor);
  if (scope_ != scope) return;
  for (size_t i = 0; i < pass_->used.size(); ++i) {
    // Whatever accumulated is still local, or half way: the next synchronized backward takes it
    // along.
    if (pass_->used[i]) context_.parameters[i].touch();
  }
  try {
    announce_end();
  } catch (const RankMismatch&) {
    // Others are elsewhere in this backward: they have seen that, too, and raise as well.
  } catch (...) {
    fail();
  }
  if (part_is_done()) {
    const bool counts = follow_the_others();
    drop_messages();
    if (counts) close_book();
  } else {
    send_failure();
    drop_messages();
  }
  call_off_failed();
}

}  // namespace apex::parallel::detail
