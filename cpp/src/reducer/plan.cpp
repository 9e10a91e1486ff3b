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
// Every rank also reads the masks for parameters outside the plan (those without a gradient on any
// rank when the plan was recorded). If one of them has a gradient on some rank, every rank sees
// that in the same step. These parameters are reduced in a second round, and belong to the plan
// from then on.

namespace {

using Kind = BucketMessage::Kind;

bool may_be_in_place(const ReducerContext& context, const Parameter& parameter) {
  const bool is_cast = context.options.allreduce_always_fp32 &&
                       (parameter.dtype == at::kHalf || parameter.dtype == at::kBFloat16);
  return !is_cast && parameter.variable.is_non_overlapping_and_dense();
}

/// Whether the dtype represents the words of reports without rounding.
bool is_exact(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kDouble; }

/// The maximum size of the reports in a bucket. Larger reports are sent separately.
constexpr int64_t kMostOfReports = int64_t{16} << 10;

/// The size of the tail of the last bucket, which carries the reports; 0 if they are sent
/// separately. See Note [How reports travel].
int64_t tail_of(const ReductionSite& site, const ReductionTraits& traits,
                const ReducerContext& context) {
  const bool plain = site.kind == Kind::kFlat && site.device.is_cpu() && traits.has_peers &&
                     !traits.runs_user_code && !traits.has_later_messages;
  if (!plain || !is_exact(site.dtype) || traits.shares_memory || !context.reads_reports()) return 0;
  const int64_t numel = ReportExchange::tail_size(context.members, context.parameters.size());
  return numel * static_cast<int64_t>(c10::elementSize(site.dtype)) <= kMostOfReports ? numel : 0;
}

PlannedBucket make_entry(const std::vector<int64_t>& members, const ReductionSite& site,
                         std::unique_ptr<Reduction> reduction, const std::vector<Place>& places,
                         ReducerContext& context, bool may_carry_report = false) {
  std::vector<at::Tensor> variables;
  for (const int64_t index : members) variables.push_back(context.parameters[index].variable);
  MessageOptions options;
  options.gradient_as_bucket_view = context.options.gradient_as_bucket_view;
  options.allreduce_always_fp32 = context.options.allreduce_always_fp32;
  const ReductionTraits traits = reduction->traits();
  options.sparse_dim = places[members.front()].sparse_dim;
  if (may_carry_report) options.tail = tail_of(site, traits, context);
  if (context.options.registered_buffers || traits.shares_memory || traits.across_hosts)
    options.allocate = registered_memory(site.group, context.statistics);
  PlannedBucket entry(BucketMessage(site.kind, members, variables, site.device, options),
                      std::move(reduction));
  entry.members = entry.pending = static_cast<int64_t>(members.size());
  return entry;
}

/// @param parameter  one of the bucket's parameters.
ReductionSite site_of(Kind kind, const Parameter& parameter, size_t index,
                      const ReducerContext& context) {
  ReductionSite site;
  site.kind = kind;
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

/// Whether gradient views lie in buckets that the ranks of a host share. Such gradients are summed
/// in place. A part of other gradients would be copied to shared memory and back in every step.
bool views_are_shared(const Parameter& parameter, const ReducerContext& context) {
  if (!context.options.gradient_as_bucket_view || !parameter.device.is_cpu()) return false;
  ReductionSite site = site_of(Kind::kFlat, parameter, 0, context);
  site.hook = context.hook;
  return context.choose(site)->traits().shares_memory;
}

Kind kind_of(const std::vector<int64_t>& members, const std::vector<Place>& places,
             const ReducerContext& context) {
  const Parameter& first = context.parameters[members.front()];
  const Place& place = places[members.front()];
  if (place.sparse) return Kind::kSparse;
  return members.size() == 1 && may_be_in_place(context, first) ? Kind::kInPlace : Kind::kFlat;
}

}  // namespace

void PlannedBucket::reset() {
  pending = members;
  launched = false;
  producers.clear();
  absent = at::Tensor();
}

void Plan::reset() {
  for (PlannedBucket& entry : entries) entry.reset();
}

void Plan::expect(const std::vector<bool>& trainable, bool static_graph) {
  watches_unplanned = false;
  for (PlannedBucket& entry : entries) entry.pending = entry.members;
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i].bucket < 0) {
      watches_unplanned = watches_unplanned || (trainable[i] && !static_graph);
    } else if (!trainable[i]) {
      --entries[places[i].bucket].pending;
    }
  }
}

void Plan::move_misplaced_gradients() {
  std::vector<const BucketMessage*> all;
  for (const PlannedBucket& entry : entries) all.push_back(&entry.message);
  for (PlannedBucket& entry : entries) entry.message.move_misplaced(all);
}

void build_entries(Plan& plan, ReducerContext& context) {
  const auto& buckets = plan.buckets.buckets;
  plan.entries.clear();
  plan.number = ++context.plans_built;
  plan.holds_gradients = false;
  for (Place& place : plan.places) place.bucket = -1;
  std::vector<Kind> kinds;
  size_t last_of_hook = 0;
  for (size_t b = 0; b < buckets.size(); ++b) {
    kinds.push_back(kind_of(buckets[b], plan.places, context));
    const Parameter& first = context.parameters[buckets[b].front()];
    if (kinds[b] == Kind::kInPlace && views_are_shared(first, context)) kinds[b] = Kind::kFlat;
    if (kinds[b] != Kind::kSparse) last_of_hook = b;
    for (size_t i = 0; i < buckets[b].size(); ++i) {
      plan.places[buckets[b][i]].bucket = static_cast<int64_t>(b);
      plan.places[buckets[b][i]].slot = i;
    }
  }
  for (size_t b = 0; b < buckets.size(); ++b) {
    ReductionSite site = site_of(kinds[b], context.parameters[buckets[b].front()], b, context);
    site.hook = context.hook;
    site.last_of_hook = b == last_of_hook;
    plan.entries.push_back(make_entry(buckets[b], site, context.choose(site), plan.places, context,
                                      /*may_carry_report=*/b + 1 == buckets.size()));
  }
  plan.carries_report = !plan.entries.empty() && plan.entries.back().message.has_tail();
}

std::vector<PlannedBucket> build_late_round(const std::vector<int64_t>& parameters,
                                            const std::vector<Place>& places,
                                            ReducerContext& context) {
  std::vector<PlannedBucket> round;
  const auto infos = parameter_infos(context, places);
  for (const auto& members : assign_buckets(infos, parameters, context.options.limits).buckets) {
    const ReductionSite site =
        site_of(kind_of(members, places, context), context.parameters[members.front()], 0, context);
    round.push_back(make_entry(members, site, context.choose(site), places, context));
  }
  return round;
}

std::vector<ParameterInfo> parameter_infos(const ReducerContext& context,
                                           const std::vector<Place>& places) {
  std::vector<ParameterInfo> infos;
  for (size_t i = 0; i < context.parameters.size(); ++i) {
    const Parameter& parameter = context.parameters[i];
    infos.push_back(
        {parameter.variable.numel(), parameter.dtype, parameter.device, places[i].sparse});
  }
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

}  // namespace apex::parallel::detail
