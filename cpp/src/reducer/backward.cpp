// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/backward.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <apex/error.h>

#include "comm/scale_in_place.h"
#include "fingerprint.h"
#include "reducer/sparse.h"
#include "watch/notice.h"

namespace apex::parallel::detail {

// Note [Order of launches]
//
// Collectives of one process group must be issued in the same order on every rank, but the order in
// which gradients become ready may differ. So a bucket is launched only after all buckets before it
// in the plan. Only the thread with the right to change the reducer launches buckets. The report
// follows the last bucket, and later collectives of a reduction follow the report.

// Note [Carried through]
//
// Ranks in a synchronized backward wait for each other's buckets. So a rank that cannot send its
// buckets, or skips them, must still take part. Otherwise the messages of its next backward would
// meet messages of other sizes, which the other ranks still wait for. So every rank carries a
// backward through once it has begun. A rank without gradients sends zeros, and its report gives
// the reason:
//
// - It failed: an exception ended its backward, in the module or in a hook. Then this backward is
//   invalid. Every rank throws, and all can continue with the next backward.
// - It left the plan (rebuild_buckets(), another communication hook).
//   If all ranks have left it, they make a new plan and reduce their gradients by that plan. If
//   some ranks have kept the plan, every rank throws.
//
// If a rank fails after its report, it is unknown what the others have received. Then the reducer
// enters Phase::kFailed.

// Note [Skipped steps]
//
// skip_step() is a field of the report. The backward is carried through as always, with or without
// gradients of this rank. When the reports are read, every rank drops the gradients and sets them
// to None, so that an optimizer steps nothing, even if the training loop does not check
// step_skipped. This is the only way to undo sums that contain this step's gradients. Gradients
// that accumulated before under no_sync() belong to the same step, and are dropped as well.
//
// With skip_failed_steps a failed backward ends in the same way.

Backward::Backward(ReducerState& state, BackwardPass pass)
    : state_(state),
      context_(state.context),
      book_(state.book),
      reporter_(state.reporter),
      pass_(std::move(pass)) {
  pass_.recorded = book_.current() == nullptr;
  state_.step_skipped = false;
  context_.enter(Phase::kRunning);
  state_.clock.backward_began();
}

std::string Backward::describe_early_write(const ReducerContext& context,
                                           const Parameter& parameter) {
  return context.me() + "parameter '" + parameter.name +
         "' is updated inside backward (by a gradient hook), with this rank's own gradient instead "
         "of the average: step after backward";
}

std::string Backward::describe() const {
  std::string text = "backward number " + std::to_string(context_.backward_number) + " has begun";
  const auto last = std::max_element(pass_.gradients.begin(), pass_.gradients.end(),
                                     [](const GradientState& one, const GradientState& other) {
                                       return one.last_fired < other.last_fired;
                                     });
  if (last != pass_.gradients.end() && last->fired > 0) {
    text += "; its last gradient was that of '" +
            context_.parameters[static_cast<size_t>(last - pass_.gradients.begin())].name + "'";
  }
  const Plan* const plan = book_.current();
  if (plan == nullptr || pass_.next_launch >= plan->entries.size()) return text;
  std::vector<std::string> missing;
  for (const int64_t i : plan->buckets.buckets[pass_.next_launch]) {
    if (pass_.gradients[i].fired < plan->places[i].expected)
      missing.push_back(context_.parameters[i].name);
  }
  text += "; bucket " + std::to_string(pass_.next_launch) + " is to be launched next";
  if (missing.empty()) return text;
  text += ", and waits for the gradient of '" + missing.front() + "'";
  if (missing.size() > 1) text += " and " + std::to_string(missing.size() - 1) + " more";
  return text + ", or for the end of backward";
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
  // kernels do not change the version; refuse_early_step() detects those.
  if (!context_.members.alone() && version_of(parameter.variable) != parameter.seen_version)
    pass_.fail(describe_early_write(context_, parameter));
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
  gradient.last_fired = ++pass_.clock;
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
  if (parameter.device.is_cpu()) {
    if (fired >= place.expected) entry.message.put(place.slot, pass_.kept[index] != 0);
  } else {
    const c10::Stream stream =
        c10::impl::VirtualGuardImpl(parameter.device.type()).getStream(parameter.device);
    auto& producers = entry.producers;
    if (std::find(producers.begin(), producers.end(), stream) == producers.end())
      producers.push_back(stream);
  }
  if (fired == place.expected) --entry.pending;
  launch_ready();
}

void Backward::launch_ready() {
  if (context_.options.delay_allreduce || context_.launches_at_end) return;
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
    if (context_.options.check_finite) reporter_.finite.look(entry.message);
    if (packed) packed();
  };
  or_end([&] { launch_bucket(entry, index, pass_, context_, before_start); });
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
    report.digest = reporter_.replicas.digest(report.facts, reporter_.trainable);
    if (context_.options.check_finite) {
      for (size_t i = 0; i < plan.places.size(); ++i) {
        if (plan.places[i].bucket < 0 && pass_.used[i] != 0)
          reporter_.finite.look(static_cast<int64_t>(i), context_.parameters[i].variable.grad());
      }
      report.non_finite = reporter_.finite.first();
    }
    if (plan.carries_report) {
      const BucketMessage& last = plan.entries.back().message;
      reporter_.write(report, pass_.used, last.tail_of(last.tensor()));
    }
  };
  for (size_t next = pass_.next_launch; next < plan.entries.size(); ++next) {
    if (next > 0) let_next_pass(plan.entries[next - 1], next - 1, context_);
    launch(next, next >= plan.plain_buckets() ? packed : std::function<void()>());
    context_.statistics.add(&ReducerStatistics::launched_at_end);
  }
  if (!plan.carries_report) {
    if (!plan.entries.empty())
      let_next_pass(plan.entries.back(), plan.entries.size() - 1, context_);
    packed();
  }
  ++plan.backwards;
  plan.holds_gradients = true;
  pass_.reported = true;
  reporter_.send(report, pass_.used, &plan);
  state_.clock.launched(context_.statistics);
}

/// Launches zeros for the remaining buckets, with the report in the one that carries it.
void Backward::launch_absent(Plan& plan, const StepReport& report) {
  const auto write = [&](const at::Tensor& tail) { reporter_.write(report, pass_.used, tail); };
  or_end([&] { detail::launch_absent(plan.entries, report.failed, context_, write); });
}

// --- all gradients are computed: this rank sends ---

void Backward::send() {
  context_.enter(Phase::kEnding);
  StepReport report = reporter_.report(book_.left());
  if (book_.current() != nullptr) return launch_rest(report);
  const std::string mine = settings();
  report.settings = Fingerprint().add(mine.data(), mine.size()).value();
  Plan* const left = book_.still_carried();
  if (left != nullptr) launch_absent(*left, report);
  pass_.reported = true;
  reporter_.send(report, pass_.used, left);
}

/// The settings that may change between backwards and must be the same on all ranks, and the kinds
/// of the parameters, which determine the sizes of messages.
std::string Backward::settings() const {
  return context_.describe_settings() + ' ' + std::to_string(context_.parameters.kinds());
}

// --- a backward without a plan ---

/// This rank's recording of this backward.
Recording Backward::recording() const {
  const ParameterTable& parameters = context_.parameters;
  Recording mine;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& grad = parameters[i].variable.grad();
    const bool used = pass_.used[i] != 0;
    RecordedParameter seen;
    seen.sparse_dim = used && grad.defined() && grad.layout() == at::kSparse
                          ? static_cast<int32_t>(grad.sparse_dim())
                          : 0;
    seen.fired = pass_.gradients[i].fired;
    mine.parameters.push_back(seen);
    if (seen.fired > 0) mine.ready_order.push_back(static_cast<int64_t>(i));
  }
  if (!context_.options.delay_allreduce) {
    std::sort(mine.ready_order.begin(), mine.ready_order.end(), [&](int64_t left, int64_t right) {
      return pass_.gradients[left].last_fired < pass_.gradients[right].last_fired;
    });
  }
  return mine;
}

/// Makes a plan, the same on every rank, and launches its buckets.
void Backward::record(const std::function<void()>& meanwhile) {
  const StepTable& table = reporter_.receive(meanwhile);
  refuse(table);
  if (context_.join.over) return;
  if (!table.same_settings()) {
    pass_.refused = true;
    reporter_.refuse_settings(context_.describe_settings());
  }
  pass_.skipped = table.skipped();
  pass_.used_by_any = table.used_by_any();
  reporter_.trainable = table.trainable_set();
  if (table.all_left()) leave_behind();
  const Recording mine = recording();
  const Membership& members = context_.members;
  const ControlMessage maximum =
      members.all_reduce("exchange of recorded gradients", encode(mine), c10d::ReduceOp::MAX);
  const ControlMessage order =
      members.broadcast("broadcast of the bucket order", encode_order(mine));
  const Recording agreed = decode(maximum.wait(), order.wait(), pass_.used_by_any);
  make_plan(mine, agreed);
  pass_.reported = false;
  pass_.next_launch = 0;  // a rank without data has launched the old plan's buckets
  launch_rest(reporter_.report(ReasonToLeave::kNone));
}

/// All ranks have left the plan. Waits for the messages that were sent by it, so that they do not
/// collide with later messages.
void Backward::leave_behind() {
  if (Plan* left = book_.sends_by()) {
    for (PlannedBucket& entry : left->entries)
      entry.reduction->wait("exchange by the plan that was left", {});
    left->reset();
  }
  book_.leave(ReasonToLeave::kRebuildBuckets);  // also on a rank without data
}

void Backward::make_plan(const Recording& mine, const Recording& agreed) {
  const ParameterTable& parameters = context_.parameters;
  const std::vector<bool>& trainable = reporter_.trainable;
  const Plan* const extended = book_.extended();
  std::vector<Place> places(parameters.size());
  for (size_t i = 0; i < places.size(); ++i) {
    const RecordedParameter& seen = agreed.parameters[i];
    places[i].sparse_dim = seen.sparse_dim;
    // A rank uses its own count, or the other ranks' count if it has none yet.
    places[i].expected =
        std::max<int32_t>(1, mine.parameters[i].fired > 0 ? mine.parameters[i].fired : seen.fired);
  }
  // A frozen parameter may have an older gradient. It is reduced on demand.
  std::vector<int64_t> ready;
  for (const int64_t i : agreed.ready_order) {
    if (trainable[i] && !places[i].is_sparse()) ready.push_back(i);
  }
  for (size_t i = 0; extended != nullptr && i < places.size(); ++i) {
    if (extended->places[i].is_sparse() && agreed.parameters[i].fired == 0)
      places[i] = extended->places[i];
  }
  std::vector<int64_t> older;
  if (extended != nullptr) {
    for (const auto& bucket : extended->buckets.buckets)
      older.insert(older.end(), bucket.begin(), bucket.end());
    for (size_t i = 0; i < places.size(); ++i) {
      if (extended->places[i].demanded) older.push_back(static_cast<int64_t>(i));
    }
  }
  for (const int64_t i : older) {
    if (places[i].is_sparse() || std::find(ready.begin(), ready.end(), i) != ready.end()) continue;
    places[i] = extended->places[i];
    ready.push_back(i);
  }
  context_.statistics.add(&ReducerStatistics::plans_recorded);
  BucketLimits limits = context_.options.limits;
  if (context_.options.delay_allreduce)
    limits.cap = limits.first_cap = std::numeric_limits<int64_t>::max();
  Plan& plan = book_.put(std::move(places));
  plan.buckets =
      assign_buckets(parameter_infos(context_), ready, limits, context_.options.trigger_parameters);
  plan.kinds = context_.parameters.kinds();
  build_entries(plan, context_);
  plan.expect(trainable, context_.options.static_graph);
}

// --- receiving ---

void Backward::refuse(const StepTable& table) {
  if (UnevenInputs& join = context_.join; join.active) {
    const int64_t with_data = table.ranks_with_data();
    join.over = with_data == 0;
    join.last = table.last_with_data();
    join.followed = join.without_data;
    if (join.by_ranks_with_data && !join.over) context_.divisor = with_data;
  }
  try {
    reporter_.refuse(table);
  } catch (...) {
    pass_.refused = true;
    // Not counted on any rank, because the failed ranks did not count it.
    if (Plan* plan = book_.current()) --plan->backwards;
    throw;
  }
}

/// Whether the other ranks' reports decide about a parameter of the plan. A frozen parameter has no
/// gradient on any rank, unless one accumulated before it was frozen.
bool Backward::misses_gradients() const {
  const Plan& plan = *book_.current();
  for (size_t i = 0; i < plan.places.size(); ++i) {
    if (!plan.places[i].is_planned() || pass_.used[i] != 0) continue;
    if (reporter_.trainable[i] || (context_.parameters_changed && pass_.accumulated)) return true;
  }
  return false;
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
  if (!must_read()) return reporter_.order();
  const StepTable& table = reporter_.receive(meanwhile);
  refuse(table);
  reporter_.trainable = table.trainable_set();
  pass_.used_by_any = table.used_by_any();
  pass_.skipped = pass_.skipped || table.skipped();
  if (!pass_.skipped) context_.total_weight = table.total_weight();
  if (context_.options.check_finite) {
    pass_.non_finite = table.describe_non_finite(reporter_.names());
    pass_.skipped =
        pass_.skipped || (context_.options.skip_failed_steps && !pass_.non_finite.empty());
  }
}

/// Averages the sparse gradients that a rank used. Their sizes differ by rank, so the ranks
/// exchange them when all other messages are sent and the reports have shown which ones there are.
void Backward::reduce_sparse() {
  const Plan& plan = this->plan();
  for (size_t i = 0; plan.has_sparse && i < plan.places.size(); ++i) {
    if (!plan.places[i].is_sparse() || pass_.used_by_any[i] == 0) continue;
    const at::Tensor& variable = context_.parameters[i].variable;
    const Averaging factors =
        averaging_of(context_.options, {}, variable.scalar_type(), context_.divisor,
                     context_.members.size, context_.total_weight);
    at::Tensor sum =
        sparse_gradient(variable, plan.places[i].sparse_dim).mul(factors.before).coalesce();
    if (!context_.members.alone()) sum = sparse_all_reduce(sum, context_.members.group_of(0));
    if (factors.after != 1.0) scale_in_place(sum, factors.after);
    if (has_no_weight()) sum.zero_();
    variable.mutable_grad() = sum;
  }
}

/// Whether no rank had a sample. Then there is no mean, and the gradients may be NaN.
bool Backward::has_no_weight() const {
  return context_.options.weighted && context_.total_weight == 0 && !pass_.skipped;
}

void Backward::clear_without_weight(const std::vector<BucketMessage::Slot>& slots) {
  if (!has_no_weight()) return;
  TORCH_WARN_ONCE("apex: the weights of all ranks are 0, so all gradients of backward number ",
                  context_.backward_number, " are 0");
  const at::NoGradGuard no_grad;
  for (const BucketMessage::Slot& slot : slots) {
    const at::Tensor& grad = slot.variable.grad();
    if (grad.defined()) grad.zero_();
  }
}

void Backward::complete(const std::function<void()>& meanwhile) {
  if (context_.join.without_data && book_.current() != nullptr) {
    const StepTable& table = reporter_.receive(meanwhile);
    if (table.all_left()) leave_behind();
  }
  if (book_.current() == nullptr) record(meanwhile);
  if (book_.current() == nullptr) return;  // no rank has data for a plan
  judge(meanwhile);
  Plan& plan = this->plan();
  for (size_t b = 0; b < plan.entries.size(); ++b) complete_entry(plan.entries[b], b, meanwhile);
  reduce_on_demand(meanwhile);
  reduce_sparse();
  if (plan.watches_demand || misses_gradients() || pass_.demanded)
    context_.statistics.add(&ReducerStatistics::usage_reads);
  if (context_.reads_reports()) {
    const StepTable& table = reporter_.receive();
    pass_.out_of_step = reporter_.compare(table);
    compare_replicas(table);
  }
}

void Backward::complete_entry(PlannedBucket& entry, size_t index,
                              const std::function<void()>& meanwhile) {
  try {
    await_bucket(entry, index, meanwhile, context_);
  } catch (const CommunicationError&) {
    // The first failure is the cause, not the missing messages of the others.
    if (pass_.failure) std::rethrow_exception(pass_.failure);
    throw;
  }
  if (pass_.failure) return;
  try {
    hand_out_bucket(entry, pass_, context_);
    clear_without_weight(entry.message.slots());
  } catch (...) {
    // Only this rank failed, and exchanges may follow: see Note [Carried through].
    pass_.failure = std::current_exception();
  }
}

/// Reduces the buckets on demand that a rank has used. Every rank has read the same reports, so
/// every rank reduces the same ones.
void Backward::reduce_on_demand(const std::function<void()>& meanwhile) {
  std::vector<PlannedBucket>& buckets = plan().on_demand;
  const auto is_used = [&](const BucketMessage::Slot& slot) {
    return pass_.used_by_any[slot.parameter] != 0;
  };
  std::vector<size_t> demanded;
  for (size_t i = 0; i < buckets.size(); ++i) {
    const auto& slots = buckets[i].message.slots();
    if (std::any_of(slots.begin(), slots.end(), is_used)) demanded.push_back(i);
  }
  const size_t first = plan().entries.size();
  for (const size_t i : demanded)
    or_end([&] { launch_bucket(buckets[i], first + i, pass_, context_, {}); });
  for (const size_t i : demanded) complete_entry(buckets[i], first + i, meanwhile);
  for (size_t i = 0; i < plan().places.size(); ++i) {
    Place& place = plan().places[i];
    // A frozen parameter has an older gradient, which comes once.
    if (place.is_planned() || pass_.used_by_any[i] == 0 || !reporter_.trainable[i]) continue;
    place.demanded = pass_.demanded = true;
    place.expected = std::max<int32_t>(1, pass_.gradients[i].fired);
  }
}

void Backward::compare_replicas(const StepTable& table) {
  if (pass_.skipped || !pass_.out_of_step.empty()) return;
  std::string why = reporter_.replicas.compare(table);
  if (why.empty()) return;
  why +=
      ": load a checkpoint on every rank, or use replica_check_every=0 if they differ on purpose";
  if (context_.options.on_divergence == OnDivergence::kRaise) {
    pass_.out_of_step = context_.me() + why;
  } else if (context_.members.rank == 0) {
    notify(why);
  }
}

// --- the end of a backward ---

void Backward::conclude() {
  if (pass_.failure) {
    const std::exception_ptr failure = pass_.failure;
    drop_messages();
    book_.served(reporter_.trainable, pass_.demanded);
    std::rethrow_exception(failure);
  }
  if (book_.current() == nullptr) return drop_messages();
  if (pass_.skipped) call_off();
  for (Parameter& parameter : context_.parameters) parameter.touched = false;
  remember_reduced();
  const bool recorded = plan().backwards <= 1;
  plan().reset();
  context_.enter(Phase::kIdle);
  book_.served(reporter_.trainable, pass_.demanded);
  context_.parameters_changed = false;
  // Ranks without a gradient in a skipped step recorded nothing that later steps could use.
  if (pass_.skipped && recorded) book_.forget();
  if (!context_.join.over) context_.statistics.add(&ReducerStatistics::backwards);
  state_.clock.ended(context_.statistics);
  pass_.rethrow();
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
  pass_.non_finite.clear();
  context_.statistics.add(&ReducerStatistics::steps_skipped);
}

void Backward::remember_reduced() {
  if (!context_.leaves_sums() && !context_.join.active) return;
  for (size_t i = 0; i < plan().places.size(); ++i) {
    Parameter& parameter = context_.parameters[i];
    const at::Tensor& grad = parameter.variable.grad();
    if (!grad.defined() || !plan().places[i].is_planned()) continue;
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
  if (pass_.reported) reporter_.drop();  // it may lie in a message of this backward
  drop_messages();
  // The other ranks skip the step, so this rank skips it as well.
  if (context_.options.skip_failed_steps && context_.phase == Phase::kIdle) call_off();
}

/// Notifies the other ranks. Does not wait for them, unless a communication hook does.
void Backward::send_failure() noexcept {
  if (context_.phase == Phase::kFailed || context_.phase == Phase::kReleased) return;
  try {
    Plan* const plan = book_.sends_by();
    if (plan != nullptr) launch_absent(*plan, reporter_.failure());
    if (plan == nullptr || !plan->carries_report)
      reporter_.send(reporter_.failure(), pass_.used, plan);
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
  state_.clock.dropped();
  if (in_backward(context_.phase)) context_.enter(Phase::kIdle);
}

}  // namespace apex::parallel::detail
