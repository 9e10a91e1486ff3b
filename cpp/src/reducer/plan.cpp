// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/plan.h"

#include <utility>

#include "reducer/registered_memory.h"
#include "step/report_exchange.h"

namespace apex::parallel::detail {

// Note [Parameters that a rank does not use]
//
// A rank without a gradient for a parameter must know whether another rank has one. If so, it needs
// the average. If not, its .grad must stay unchanged (None, for an optimizer that skips such
// parameters). Every rank's report contains its used-parameter mask. A rank reads the masks if it
// has no gradient for some parameter. A rank with all gradients does not need them, and on devices
// it does not wait.
//
// Every rank also reads the masks while parameters are trainable that no rank used when the plan
// was recorded. If one of them has a gradient on some rank, every rank sees that in the same step.
// Its bucket, which is in the plan on demand, is then launched after the reports, and the next
// backward records a plan that has it among the others.

namespace {

/// Whether the dtype represents the words of reports without rounding.
bool is_exact(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kDouble; }

/// Number of backwards. GANs train their critic up to a hundred times per step of the generator.
constexpr int64_t kKeptFor = 128;

/// The maximum size of the reports in a bucket. Larger reports are sent separately.
constexpr int64_t kMostOfReports = int64_t{16} << 10;

/// The size of the tail of the last bucket, which carries the reports; 0 if they are sent
/// separately. See Note [How reports travel].
int64_t tail_of(const ReductionSite& site, const ReductionTraits& traits,
                const ReducerContext& context) {
  const bool plain = site.device.is_cpu() && traits.has_peers && !traits.runs_user_code;
  if (!plain || !is_exact(site.dtype) || traits.shares_memory || !context.reads_reports()) return 0;
  const int64_t numel = ReportExchange::tail_size(context.members, context.parameters.size());
  return numel * static_cast<int64_t>(c10::elementSize(site.dtype)) <= kMostOfReports ? numel : 0;
}

PlannedBucket make_entry(const std::vector<int64_t>& members, const ReductionSite& site,
                         std::unique_ptr<Reduction> reduction, ReducerContext& context,
                         bool may_carry_report = false) {
  std::vector<at::Tensor> variables;
  for (const int64_t index : members) variables.push_back(context.parameters[index].variable);
  MessageOptions options;
  options.gradient_as_bucket_view = context.options.gradient_as_bucket_view;
  options.allreduce_always_fp32 = context.options.allreduce_always_fp32;
  const ReductionTraits traits = reduction->traits();
  if (may_carry_report) options.tail = tail_of(site, traits, context);
  if (context.options.registered_buffers || traits.shares_memory || traits.across_hosts)
    options.allocate = registered_memory(site.group, context.statistics);
  PlannedBucket entry(BucketMessage(members, variables, site.device, std::move(options)),
                      std::move(reduction));
  entry.members = entry.pending = static_cast<int64_t>(members.size());
  return entry;
}

/// @param parameter  one of the bucket's parameters.
ReductionSite site_of(const Parameter& parameter, size_t index, const ReducerContext& context) {
  ReductionSite site;
  site.device = parameter.device;
  site.dtype = message_dtype(parameter.dtype, context.options.allreduce_always_fp32);
  site.index = index;
  site.group = context.members.group_of(index);
  site.all_groups = context.members.groups;
  site.alone = context.members.alone();
  site.plain_average = context.options.gradient_average && !context.options.weighted &&
                       context.options.gradient_predivide_factor == 1.0;
  return site;
}

}  // namespace

void PlannedBucket::reset() {
  pending = members;
  launched = false;
  producers.clear();
}

void Plan::reset() {
  for (auto* buckets : {&entries, &on_demand}) {
    for (PlannedBucket& entry : *buckets) entry.reset();
  }
}

void Plan::expect(const std::vector<bool>& trainable, bool static_graph) {
  watches_demand = false;
  // The last backward may have used a bucket on demand.
  for (PlannedBucket& entry : on_demand) {
    if (entry.message.gradients_buffer().defined()) entry.message.abandon();
  }
  for (PlannedBucket& entry : entries) entry.pending = entry.members;
  for (size_t i = 0; i < places.size(); ++i) {
    if (!places[i].is_planned()) {
      watches_demand = watches_demand || (trainable[i] && !static_graph);
    } else if (places[i].bucket >= 0 && !trainable[i]) {
      --entries[places[i].bucket].pending;
    }
  }
}

void build_entries(Plan& plan, ReducerContext& context) {
  const auto& buckets = plan.buckets.buckets;
  plan.entries.clear();
  plan.holds_gradients = false;
  plan.has_sparse = false;
  for (Place& place : plan.places) {
    place.bucket = -1;
    place.demanded = false;
    plan.has_sparse = plan.has_sparse || place.is_sparse();
  }
  for (size_t b = 0; b < buckets.size(); ++b) {
    for (size_t i = 0; i < buckets[b].size(); ++i) {
      plan.places[buckets[b][i]].bucket = static_cast<int64_t>(b);
      plan.places[buckets[b][i]].slot = i;
    }
  }
  for (size_t b = 0; b < buckets.size(); ++b) {
    ReductionSite site = site_of(context.parameters[buckets[b].front()], b, context);
    site.hook = context.hook;
    site.is_last = b + 1 == buckets.size();
    plan.entries.push_back(make_entry(buckets[b], site, context.choose(site), context,
                                      /*may_carry_report=*/site.is_last));
  }
  plan.carries_report = !plan.entries.empty() && plan.entries.back().message.has_tail();
  std::vector<int64_t> rest;
  for (auto i = static_cast<int64_t>(plan.places.size()) - 1; i >= 0; --i) {
    const at::ScalarType dtype = context.parameters[i].dtype;
    if (!plan.places[i].is_planned() && (at::isFloatingType(dtype) || at::isComplexType(dtype)))
      rest.push_back(i);
  }
  const BucketPlan others = assign_buckets(parameter_infos(context), rest, context.options.limits);
  plan.on_demand.clear();
  for (const auto& members : others.buckets) {
    const ReductionSite site = site_of(context.parameters[members.front()],
                                       buckets.size() + plan.on_demand.size(), context);
    plan.on_demand.push_back(make_entry(members, site, context.choose(site), context));
  }
}

std::vector<ParameterInfo> parameter_infos(const ReducerContext& context) {
  std::vector<ParameterInfo> infos;
  for (const Parameter& parameter : context.parameters)
    infos.push_back({parameter.variable.numel(), parameter.dtype, parameter.device});
  return infos;
}

std::string describe_bucket(const PlannedBucket& entry, size_t index,
                            const ReducerContext& context) {
  const auto& slots = entry.message.slots();
  std::string text = entry.reduction->describe() + std::to_string(index);
  const std::string backward = ", of backward number " + std::to_string(context.backward_number);
  text += " (parameter '" + context.parameters[slots.front().parameter].name + "'";
  if (slots.size() > 1) {
    text += " to '" + context.parameters[slots.back().parameter].name + "', " +
            std::to_string(slots.size()) + " parameters";
  }
  return text + ", " + std::to_string(entry.message.numel()) + " elements)" + backward;
}

// --- the plan of a reducer ---

void PlanBook::forget() {
  plan_.reset();
  extended_.reset();
  left_ = ReasonToLeave::kNone;
  next_ = Next::kSame;
}

void PlanBook::leave(ReasonToLeave reason) {
  if (!plan_) return;
  if (reason != ReasonToLeave::kOwner && !context_.reads_reports()) return forget();
  plan_->holds_gradients = false;
  if (left_ == ReasonToLeave::kNone || reason != ReasonToLeave::kOwner) left_ = reason;
}

bool PlanBook::has_frozen(const std::vector<bool>& trainable) const {
  for (size_t i = 0; i < trainable.size(); ++i) {
    if (plan_->places[i].is_planned() && !trainable[i]) return true;
  }
  return false;
}

/// Another reducer may write the gradient of a parameter that this one does not own.
bool PlanBook::owns_all() const {
  for (size_t i = 0; i < plan_->places.size(); ++i) {
    if (plan_->places[i].is_planned() && !context_.parameters.owns(context_.parameters[i]))
      return false;
  }
  return true;
}

void PlanBook::choose(const std::vector<bool>& trainable, bool follows) {
  if (!plan_) return;
  if (const Next next = std::exchange(next_, Next::kSame); next != Next::kSame) {
    extended_ = std::move(plan_);
    if (next == Next::kSmaller) extended_.reset();
    return;
  }
  // A change may have been reverted. The check of kinds reads all parameters, so it runs only if
  // they were the reason.
  if (left_ == ReasonToLeave::kOwner ||
      (left_ == ReasonToLeave::kParameters && plan_->kinds == context_.parameters.kinds())) {
    left_ = ReasonToLeave::kNone;
  }
  if (left_ != ReasonToLeave::kNone) return;
  if (!follows && !owns_all()) return leave(ReasonToLeave::kOwner);
  plan_->expect(trainable, context_.options.static_graph);
}

Plan& PlanBook::put(std::vector<Place> places) {
  plan_ = std::make_unique<Plan>();
  plan_->places = std::move(places);
  extended_.reset();
  left_ = ReasonToLeave::kNone;
  next_ = Next::kSame;
  same_for_ = 0;
  return *plan_;
}

void PlanBook::served(const std::vector<bool>& trainable, bool demanded) {
  same_for_ = trainable == set_ ? same_for_ + 1 : 0;
  set_ = trainable;
  if (!plan_ || left_ != ReasonToLeave::kNone) return;
  if (demanded) {
    next_ = Next::kLarger;
  } else if (same_for_ >= kKeptFor && has_frozen(trainable)) {
    next_ = Next::kSmaller;
  }
}

}  // namespace apex::parallel::detail
