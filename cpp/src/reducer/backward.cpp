// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/backward.h"

#include <algorithm>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

#include <apex/error.h>

#include "fingerprint.h"
#include "watch/stall.h"

namespace apex::parallel::detail {

Backward::Backward(ReducerState& state, BackwardPass pass, const BackwardSession& session)
    : state_(state),
      context_(state.context),
      book_(state.book),
      reporter_(state.reporter),
      pass_(std::move(pass)),
      session_(session) {
  pass_.recorded = book_.current() == nullptr;
  state_.step_skipped = false;
  context_.phase = Phase::kRunning;
  context_.statistics.backward_began();
}

std::string Backward::describe() const {
  std::string text = "backward number " + std::to_string(context_.backward_number) + " has begun";
  for (size_t i = 0; pass_.fired > 0 && i < pass_.gradients.size(); ++i) {
    if (pass_.gradients[i].last_fired == pass_.fired)
      text += "; its last gradient was that of '" + context_.parameters[i].name + "'";
  }
  const Plan* const plan = book_.current();
  return plan == nullptr ? text : text + plan->describe_next(pass_, context_);
}

// --- while gradients are computed ---

void Backward::gradient_ready(size_t index) {
  const Parameter& parameter = context_.parameters[index];
  if (context_.phase == Phase::kEnding) {
    throw Error(context_.me() + "parameter '" + parameter.name +
                "' got a gradient while another backward was ending: a communication hook must not "
                "start one");
  }
  GradientState& gradient = pass_.gradients[index];
  // Each rank has its own gradient, so each rank has written other values. An optimizer's fused
  // kernels do not change the version; ReducerControl::optimizer_steps() detects those.
  if (!context_.members.alone() && version_of(parameter.variable) != parameter.seen_version)
    pass_.fail(context_.describe_early_write(parameter.name));
  ++gradient.fired;
  if (parameter.variable.grad().defined()) pass_.used[index] = 1;
  if (gradient.stale && context_.leaves_sums()) {
    pass_.fail(
        context_.me() + "parameter '" + parameter.name +
        "' still held the gradient that the last synchronized backward summed over the ranks when "
        "this one began. With gradient_average=False, or with weights, the old sum was summed over "
        "the ranks again: clear gradients (zero_grad) between synchronized backwards, or "
        "accumulate under no_sync().");
  }
  if (gradient.stale && context_.join.active) reporter_.keeps_gradients = true;
  gradient.last_fired = ++pass_.fired;
  if (book_.current() != nullptr) count_down(index);
}

/// Decrements the number of gradients that the bucket waits for.
void Backward::count_down(size_t index) {
  const Parameter& parameter = context_.parameters[index];
  const Place& place = plan().places[index];
  const int32_t fired = pass_.gradients[index].fired;
  if (place.bucket < 0) {
    if (!place.is_sparse() && context_.options.static_graph) {
      pass_.fail(context_.me() + "parameter '" + parameter.name +
                 "' got a gradient, but had none on any rank in the first backward, so with "
                 "static_graph=True it has no bucket and its gradient was not averaged. Construct "
                 "without static_graph, or call rebuild_buckets() on every rank when the model "
                 "changes.");
    }
    return;
  }
  PlannedBucket& entry = plan().entries[place.bucket];
  if (entry.launched) {
    pass_.fail(
        context_.me() + "parameter '" + parameter.name + "' got gradient number " +
        std::to_string(fired) + " of one backward after its bucket had been launched, but " +
        std::to_string(place.expected) +
        " were recorded in the first backward, so this one was not averaged. A layer was probably "
        "used in more checkpointed segments than before: call rebuild_buckets() on every rank when "
        "that changes, or construct with delay_allreduce=True.");
    return;
  }
  if (parameter.kind.device.is_cpu()) {
    if (fired >= place.expected) entry.message.put(place.slot, pass_.start.kept[index] != 0);
  } else {
    const c10::Stream stream =
        c10::impl::VirtualGuardImpl(parameter.kind.device.type()).getStream(parameter.kind.device);
    auto& producers = entry.producers;
    if (std::find(producers.begin(), producers.end(), stream) == producers.end())
      producers.push_back(stream);
  }
  if (fired == place.expected) --entry.pending;
  launch_ready();
}

void Backward::launch_without_data() {
  if (book_.current() == nullptr) return;
  for (PlannedBucket& entry : plan().entries) entry.pending = 0;  // no gradient is waited for
  launch_ready();
}

void Backward::launch_ready() {
  const bool in_turns = session_.has_several() && (context_.shares_channel || context_.hook);
  if (context_.options.delay_allreduce || in_turns) return;
  auto& entries = plan().entries;
  const size_t end = plan().plain_buckets();
  while (pass_.next_launch < end && entries[pass_.next_launch].pending == 0) {
    if (pass_.next_launch > 0 && entries[pass_.next_launch - 1].reduction->holds_back_next())
      return;
    launch(pass_.next_launch);
    context_.statistics.add(&ReducerStatistics::launched_in_backward);
  }
}

void Backward::launch(size_t index, const std::function<void()>& packed) {
  PlannedBucket& entry = plan().entries[index];
  pass_.next_launch = index + 1;  // first, so that a launch that throws is not retried
  const auto before_start = [&] {
    if (context_.options.check_finite) pass_.finite.look(entry.message);
    if (packed) packed();
  };
  or_end([&] { entry.launch(pass_, context_, before_start); });
}

/// Runs `launch`. Fails the reducer if nothing more may be sent. The other ranks are notified then.
void Backward::or_end(const std::function<void()>& launch) {
  try {
    launch();
  } catch (const CommunicationError&) {
    context_.fail();
    throw;
  } catch (const Interrupted&) {
    context_.fail();
    throw;
  } catch (const HookInterrupted& interrupted) {
    context_.fail();
    std::rethrow_exception(interrupted.error);
  }
}

/// Launches the remaining buckets, then the report.
void Backward::launch_rest(StepReport report) {
  Plan& plan = this->plan();
  const auto packed = [&] {
    add_findings(report);
    const BucketMessage& last = plan.entries.back().message;
    reporter_.exchange.write(report, pass_.used, reporter_.trainable, last.tail_of(last.tensor()));
  };
  for (size_t next = pass_.next_launch; next < plan.entries.size(); ++next) {
    if (next > 0) plan.entries[next - 1].let_next_pass(context_);
    launch(next, next >= plan.plain_buckets() ? packed : std::function<void()>());
    context_.statistics.add(&ReducerStatistics::launched_at_end);
  }
  if (!plan.carries_report) {
    if (!plan.entries.empty()) plan.entries.back().let_next_pass(context_);
    add_findings(report);
  }
  plan.holds_gradients = true;
  pass_.reported = true;
  reporter_.send(report, pass_.used, &plan);
  context_.statistics.all_launched();
}

/// Adds to the report what this rank finds in its gradients and parameters. All buckets but the
/// last one are launched then.
void Backward::add_findings(StepReport& report) {
  report.digest = reporter_.replicas.digest(report.facts, reporter_.trainable);
  if (!context_.options.check_finite) return;
  for (size_t i = 0; i < pass_.used.size(); ++i) {
    if (plan().places[i].bucket < 0 && pass_.used[i] != 0)
      pass_.finite.look(static_cast<int64_t>(i), context_.parameters[i].variable.grad());
  }
  report.non_finite = pass_.finite.first();
}

/// Launches zeros for the remaining buckets, with the report in the one that carries it.
void Backward::launch_absent(Plan& plan, const StepReport& report) {
  // If reports are not read, zeros would not be detected.
  const bool poison = report.failed && !context_.reads_reports();
  const auto write = [&](const at::Tensor& tail) {
    reporter_.exchange.write(report, pass_.used, reporter_.trainable, tail);
  };
  or_end([&] {
    PlannedBucket* last = nullptr;
    for (PlannedBucket& entry : plan.entries) {
      // Also for a bucket from before the failure, whose hook may have collectives left to issue.
      if (last != nullptr && !entry.launched) last->let_next_pass(context_);
      if (!entry.launched) entry.launch_absent(poison, context_, write);
      last = &entry;
    }
    if (last != nullptr) last->let_next_pass(context_);  // the report follows
  });
}

// --- all gradients are computed: this rank sends ---

void Backward::send() {
  if (!pass_.errors.first.empty())
    throw Error(pass_.errors.first);  // the others learn it from the report
  context_.phase = Phase::kEnding;
  StepReport report = reporter_.report(book_.left());
  if (book_.current() != nullptr) return launch_rest(report);
  // What may change between backwards and must be the same on all ranks. The kinds of the
  // parameters determine the sizes of messages.
  const std::string settings =
      context_.describe_settings() + ' ' + std::to_string(context_.parameters.kinds());
  report.settings = Fingerprint().add(settings.data(), settings.size()).value();
  Plan* const left = book_.sends_by();
  if (left != nullptr) launch_absent(*left, report);
  pass_.reported = true;
  reporter_.send(report, pass_.used, left);
}

// --- a backward without a plan ---

/// Makes a plan, the same on every rank, and launches its buckets.
void Backward::record(const std::function<void()>& meanwhile) {
  const StepTable& table = reporter_.exchange.receive(meanwhile);
  refuse(table);
  if (context_.join.over) return;
  pass_.refused = !table.same_settings();
  if (pass_.refused) reporter_.refuse_settings();
  pass_.recorded = true;
  pass_.skipped = table.skipped();
  pass_.used_by_any = table.used_by_any();
  reporter_.trainable = table.trainable_set();
  if (table.all_left()) leave_behind();
  book_.record(pass_, reporter_.trainable);
  pass_.reported = false;
  pass_.next_launch = 0;  // a rank without data has launched the old plan's buckets
  launch_rest(reporter_.report(ReasonToLeave::kNone));
}

/// All ranks have left the plan. Waits for the messages that were sent by it, so that they do not
/// collide with later messages.
void Backward::leave_behind() {
  if (Plan* left = book_.sends_by()) {
    for (PlannedBucket& entry : left->entries) entry.wait({}, context_);
    left->reset();
  }
  book_.leave(ReasonToLeave::kRebuildBuckets);  // also on a rank without data
}

// --- receiving ---

void Backward::refuse(const StepTable& table) {
  if (UnevenInputs& join = context_.join; join.active) {
    const int64_t with_data = table.ranks_with_data();
    join.over = with_data == 0;
    join.last = table.last_with_data();
    join.followed = join.without_data;
    if (join.by_ranks_with_data && !join.over) join.divisor = with_data;
  }
  pass_.refused = true;
  reporter_.refuse(table);
  pass_.refused = false;
}

/// Whether the other ranks' reports decide about a parameter of the plan. A frozen parameter has no
/// gradient on any rank, unless one accumulated before it was frozen.
bool Backward::misses_gradients() const {
  return book_.current()->any_planned([&](size_t i) {
    return pass_.used[i] == 0 && (reporter_.trainable[i] || pass_.start.accumulated);
  });
}

bool Backward::must_read() const {
  if (pass_.recorded || context_.reads_reports() || context_.options.check_finite ||
      context_.options.weighted) {
    return true;
  }
  const Plan& plan = *book_.current();
  if (plan.watches_demand || plan.has_sparse || (context_.members.alone() && reporter_.wants_skip))
    return true;
  for (size_t i = 0; i < plan.places.size(); ++i) {
    if (pass_.used[i] != 0 && !plan.places[i].is_planned()) return true;
  }
  return misses_gradients();
}

void Backward::judge(const std::function<void()>& meanwhile) {
  pass_.used_by_any = pass_.used;
  if (!must_read()) return reporter_.exchange.order();
  const StepTable& table = reporter_.exchange.receive(meanwhile);
  refuse(table);
  reporter_.trainable = table.trainable_set();
  pass_.used_by_any = table.used_by_any();
  pass_.skipped = pass_.skipped || table.skipped();
  if (!pass_.skipped) context_.total_weight = table.total_weight();
  const bool counts = !pass_.skipped && !context_.join.over;
  if (context_.options.weighted && counts && context_.total_weight == 0) {
    TORCH_WARN_ONCE("apex: the weights of all ranks are 0, so all gradients of backward number ",
                    context_.backward_number, " are 0");
  }
  if (context_.options.check_finite) {
    pass_.errors.non_finite = table.describe_non_finite(reporter_.names());
    pass_.skipped =
        pass_.skipped || (context_.options.skip_failed_steps && !pass_.errors.non_finite.empty());
  }
}

/// Averages the sparse gradients that a rank used. Their sizes differ by rank, so the ranks
/// exchange them when all other messages are sent and the reports have shown which ones there are.
void Backward::reduce_sparse() {
  const Plan& plan = this->plan();
  for (size_t i = 0; plan.has_sparse && i < plan.places.size(); ++i) {
    if (!plan.places[i].is_sparse() || pass_.used_by_any[i] == 0) continue;
    const at::Tensor& variable = context_.parameters[i].variable;
    variable.mutable_grad() = average_sparse(
        variable, plan.places[i].sparse_dim, context_.averaging({}, variable.scalar_type()),
        context_.members.alone() ? nullptr : context_.members.group_of(0));
  }
}

void Backward::complete(const std::function<void()>& meanwhile) {
  if (context_.join.without_data && book_.current() != nullptr) {
    const StepTable& table = reporter_.exchange.receive(meanwhile);
    if (table.all_left()) leave_behind();
  }
  if (book_.current() == nullptr) record(meanwhile);
  if (book_.current() == nullptr) return;  // no rank has data for a plan
  judge(meanwhile);
  Plan& plan = this->plan();
  for (PlannedBucket& entry : plan.entries) complete_entry(entry, meanwhile);
  reduce_on_demand(meanwhile);
  reduce_sparse();
  if (plan.watches_demand || misses_gradients())
    context_.statistics.add(&ReducerStatistics::usage_reads);
  if (context_.reads_reports()) {
    const StepTable& table = reporter_.exchange.receive();
    pass_.errors.out_of_step = reporter_.compare(table);
    compare_replicas(table);
  }
}

void Backward::complete_entry(PlannedBucket& entry, const std::function<void()>& meanwhile) {
  try {
    entry.wait(meanwhile, context_);
  } catch (const CommunicationError&) {
    // The first failure is the cause, not the missing messages of the others.
    if (pass_.errors.failure) std::rethrow_exception(pass_.errors.failure);
    throw;
  }
  if (pass_.errors.failure) return;
  try {
    entry.hand_out(pass_, context_);
  } catch (...) {
    // Only this rank failed, and exchanges may follow: see Note [Carried through].
    pass_.errors.failure = std::current_exception();
  }
}

/// Reduces the buckets on demand that a rank has used. Every rank has read the same reports, so
/// every rank reduces the same ones.
void Backward::reduce_on_demand(const std::function<void()>& meanwhile) {
  const auto is_used = [&](const BucketMessage::Slot& slot) {
    return pass_.used_by_any[slot.parameter] != 0;
  };
  std::vector<PlannedBucket*> demanded;
  for (PlannedBucket& entry : plan().on_demand) {
    const auto& slots = entry.message.slots();
    if (std::any_of(slots.begin(), slots.end(), is_used)) demanded.push_back(&entry);
  }
  for (PlannedBucket* entry : demanded) or_end([&] { entry->launch(pass_, context_, {}); });
  for (PlannedBucket* entry : demanded) complete_entry(*entry, meanwhile);
  for (size_t i = 0; i < plan().places.size(); ++i) {
    Place& place = plan().places[i];
    // A frozen parameter has an older gradient, which comes once.
    if (place.is_planned() || pass_.used_by_any[i] == 0 || !reporter_.trainable[i]) continue;
    place.demanded = true;
    place.expected = std::max<int32_t>(1, pass_.gradients[i].fired);
  }
}

void Backward::compare_replicas(const StepTable& table) {
  if (pass_.skipped || !pass_.errors.out_of_step.empty()) return;
  const std::string why = reporter_.replicas.compare(table);
  if (why.empty()) return;
  if (context_.options.on_divergence == OnDivergence::kRaise) {
    pass_.errors.out_of_step = context_.me() + why;
  } else if (context_.members.rank == 0) {
    notify(why);
  }
}

// --- the end of a backward ---

void Backward::conclude() {
  if (pass_.errors.failure) {
    drop_messages();
    book_.served(reporter_.trainable);
    std::rethrow_exception(pass_.errors.failure);
  }
  if (book_.current() == nullptr) return drop_messages();
  if (pass_.skipped) call_off();
  remember_reduced();
  plan().reset();
  context_.phase = Phase::kIdle;
  book_.served(reporter_.trainable);
  // Ranks without a gradient in a skipped step recorded nothing that later steps could use.
  if (pass_.skipped && pass_.recorded) book_.forget();
  if (!context_.join.over) context_.statistics.add(&ReducerStatistics::backwards);
  context_.statistics.backward_ended();
  if (!pass_.errors.out_of_step.empty()) throw RankMismatch(pass_.errors.out_of_step);
  if (!pass_.errors.non_finite.empty()) throw NonFiniteGradient(pass_.errors.non_finite);
}

/// Drops all gradients of this backward: see Note [Skipped steps].
void Backward::call_off() {
  state_.step_skipped = true;
  for (Parameter& parameter : context_.parameters) {
    if (!context_.parameters.owns(parameter)) continue;
    parameter.touched = false;
    parameter.variable.mutable_grad() = at::Tensor();
  }
  if (Plan* plan = book_.current()) plan->holds_gradients = false;
  pass_.errors.non_finite.clear();
  context_.statistics.add(&ReducerStatistics::steps_skipped);
}

/// Gradients are averages now. Remembers them where they must not be summed again.
void Backward::remember_reduced() {
  const bool remembers = context_.leaves_sums() || context_.join.active;
  for (size_t i = 0; i < plan().places.size(); ++i) {
    Parameter& parameter = context_.parameters[i];
    parameter.touched = false;
    if (!remembers || !plan().places[i].is_planned()) continue;
    const at::Tensor& grad = parameter.variable.grad();
    if (!grad.defined()) continue;
    parameter.reduced =
        c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(grad.getIntrusivePtr());
    parameter.reduced_version = grad._version();
  }
}

void Backward::fail() noexcept {
  if (context_.phase == Phase::kRunning) {
    // Accumulated gradients are still local, at least in part. The next synchronized backward
    // includes them.
    for (size_t i = 0; i < pass_.used.size(); ++i) {
      if (pass_.used[i] != 0) context_.parameters[i].touch();
    }
  }
  if (!pass_.refused && !pass_.reported) {
    send_failure();
  } else if (!pass_.refused) {
    context_.fail();  // the other ranks are not notified
  }
  if (pass_.reported) reporter_.exchange.drop();  // it may lie in a message of this backward
  drop_messages();
  // The other ranks skip the step, so this rank skips it as well.
  if (context_.options.skip_failed_steps && context_.phase == Phase::kIdle) call_off();
}

/// Notifies the other ranks. Does not wait for them, unless a communication hook does.
void Backward::send_failure() noexcept {
  if (context_.phase == Phase::kFailed || context_.phase == Phase::kReleased) return;
  try {
    Plan* const plan = book_.sends_by();
    const StepReport report = reporter_.report(ReasonToLeave::kNone, /*failed=*/true);
    if (plan != nullptr) launch_absent(*plan, report);
    if (plan == nullptr || !plan->carries_report) reporter_.send(report, pass_.used, plan);
  } catch (...) {
    context_.fail();
  }
}

void Backward::drop_messages() noexcept {
  if (Plan* plan = book_.sends_by()) {
    for (auto* buckets : {&plan->entries, &plan->on_demand}) {
      for (PlannedBucket& entry : *buckets) {
        entry.reduction->drop();
        entry.message.abandon();
      }
    }
    plan->holds_gradients = false;
    plan->reset();
  }
  context_.statistics.backward_failed();
  if (in_backward(context_.phase)) context_.phase = Phase::kIdle;
}

}  // namespace apex::parallel::detail
