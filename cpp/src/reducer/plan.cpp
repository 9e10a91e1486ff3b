// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/plan.h"

#include <algorithm>
#include <utility>

#include "reducer/registered_memory.h"
#include "reducer/step_facts.h"

namespace apex::parallel::detail {

// Note [The used-parameter mask travels with the gradients]
//
// A rank that produced no gradient for a parameter has to know whether another rank did: if so it
// needs the average, if not its .grad must stay as it is (None, for an optimizer that skips such
// parameters). Asking in a collective of its own would cost every step of every user. Instead, each
// flat bucket ends with one number per parameter, 1 or 0, which is summed with the gradients: those
// of its own members and those of the buckets in place (or sparse) that were launched since the
// previous flat bucket and have no room for it. If the plan ends with such a bucket, one with a
// trailer only follows. A rank reads the mask only if it missed a gradient itself; a rank that has
// all of them needs to know nothing. So the ordinary step pays a few bytes and no wait.
//
// Behind the mask the last message carries facts about the step that each rank is in; see
// Note [Ranks that are out of step] and Note [Parameters that are frozen or unfrozen].
//
// Parameters outside the plan (no rank had a gradient when the plan was recorded) are reported by
// the last bucket, which is then launched at the end of backward and read by every rank: if one of
// them did get a gradient somewhere, every rank learns of it in the same step, they are reduced in
// a second round, and are part of the plan from then on.

namespace {

using Kind = BucketMessage::Kind;

/// A bucket of one parameter is reduced in place from this size on: below, a copy into a flat
/// bucket that also carries the mask is cheaper than a bucket for the mask alone.
constexpr int64_t kInPlaceBytes = int64_t{64} << 10;

bool may_be_in_place(const ReducerContext& context, const Parameter& parameter,
                     const Place& place) {
  const bool is_cast = context.options.allreduce_always_fp32 &&
                       (parameter.dtype == at::kHalf || parameter.dtype == at::kBFloat16);
  return !is_cast && !place.in_parts && parameter.variable.is_non_overlapping_and_dense();
}

/// How many facts a trailer on `device` carries.
int facts_on(at::Device device, const ReducerContext& context) {
  return context.reads_facts(device) ? StepFacts::kCount : 0;
}

PlannedBucket make_entry(Kind kind, const std::vector<int64_t>& members, BucketTrailer trailer,
                         at::Device device, const ReductionSite& site,
                         std::unique_ptr<Reduction> reduction, const std::vector<Place>& places,
                         ReducerContext& context) {
  std::vector<at::Tensor> variables;
  std::vector<uint8_t> in_parts;
  for (const int64_t index : members) {
    variables.push_back(context.parameters[index].variable);
    in_parts.push_back(places[index].in_parts);
  }
  MessageOptions options;
  options.gradient_as_bucket_view = context.options.gradient_as_bucket_view;
  options.allreduce_always_fp32 = context.options.allreduce_always_fp32;
  if (!members.empty()) options.sparse_dim = places[members.front()].sparse_dim;
  const ReductionTraits traits = reduction->traits();
  if (context.options.registered_buffers || traits.shares_memory || traits.across_hosts)
    options.allocate = registered_memory(site.group, context.statistics);
  PlannedBucket entry(
      BucketMessage(kind, members, variables, std::move(trailer), device, options, in_parts),
      std::move(reduction));
  entry.members = entry.pending = static_cast<int64_t>(members.size());
  return entry;
}

/// @param parameter  of the bucket; null: there is none.
ReductionSite site_of(Kind kind, at::Device device, const Parameter* parameter, size_t index,
                      const ReducerContext& context) {
  ReductionSite site;
  site.kind = kind;
  site.device = device;
  if (parameter != nullptr)
    site.dtype = message_dtype(parameter->dtype, context.options.allreduce_always_fp32);
  site.index = index;
  site.group = context.members.group_of(index);
  site.all_groups = context.members.groups;
  site.alone = context.members.alone();
  site.plain_average =
      context.options.gradient_average && context.options.gradient_predivide_factor == 1.0;
  return site;
}

/// Gradients that stay in buckets which the ranks of a host share are summed there without a copy;
/// where a gradient lies otherwise, a part of it would be copied there and back in every step.
bool views_are_shared(const Parameter& parameter, const ReducerContext& context) {
  if (!context.options.gradient_as_bucket_view || !parameter.device.is_cpu()) return false;
  ReductionSite site = site_of(Kind::kFlat, parameter.device, &parameter, 0, context);
  site.hook = context.hook;
  return context.choose(site)->traits().shares_memory;
}

/// Decided from the back: a small bucket is reduced in place only if a flat one follows that
/// carries its mask.
std::vector<Kind> kinds_of(const Plan& plan, const ReducerContext& context) {
  const auto& buckets = plan.buckets.buckets;
  std::vector<Kind> kinds(buckets.size(), Kind::kFlat);
  bool flat_follows = false;
  for (size_t b = buckets.size(); b-- > 0;) {
    const Parameter& first = context.parameters[buckets[b].front()];
    if (plan.places[buckets[b].front()].sparse) {
      kinds[b] = Kind::kSparse;
      continue;
    }
    const bool worth_it =
        flat_follows || static_cast<int64_t>(first.variable.nbytes()) >= kInPlaceBytes;
    if (buckets[b].size() == 1 && worth_it &&
        may_be_in_place(context, first, plan.places[buckets[b].front()]) &&
        !views_are_shared(first, context)) {
      kinds[b] = Kind::kInPlace;
    } else {
      flat_follows = true;
    }
  }
  return kinds;
}

/// Parameters that are in no bucket and may get a gradient all the same.
std::vector<int64_t> unplanned(const Plan& plan, const ReducerContext& context) {
  std::vector<int64_t> result;
  if (context.options.static_graph) return result;
  for (size_t i = 0; i < plan.places.size(); ++i) {
    if (plan.places[i].bucket < 0 && plan.places[i].trainable_anywhere)
      result.push_back(static_cast<int64_t>(i));
  }
  return result;
}

}  // namespace

void PlannedBucket::reset() {
  pending = members;
  launched = completed = false;
  producers.clear();
  user_code_failed = false;
  largest = absent = at::Tensor();
}

void Plan::reset() {
  for (PlannedBucket& entry : entries) entry.reset();
}

void Plan::move_misplaced_gradients() {
  std::vector<const BucketMessage*> all;
  for (const PlannedBucket& entry : entries) all.push_back(&entry.message);
  for (PlannedBucket& entry : entries) entry.message.move_misplaced(all);
}

bool Plan::has_later_messages() const {
  return std::any_of(entries.begin(), entries.end(),
                     [](const PlannedBucket& entry) { return entry.traits.has_later_messages; });
}

void build_entries(Plan& plan, ReducerContext& context) {
  const auto& buckets = plan.buckets.buckets;
  const std::vector<Kind> kinds = kinds_of(plan, context);
  plan.entries.clear();
  plan.number = ++context.plans_built;
  plan.holds_gradients = false;
  for (Place& place : plan.places) place.bucket = -1;
  size_t last_of_hook = 0;
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (kinds[b] != Kind::kSparse) last_of_hook = b;
    for (size_t i = 0; i < buckets[b].size(); ++i) {
      plan.places[buckets[b][i]].bucket = static_cast<int64_t>(b);
      plan.places[buckets[b][i]].slot = i;
    }
  }
  std::vector<int64_t> outside = unplanned(plan, context);
  plan.watches_unplanned = !outside.empty();

  std::vector<int64_t> unreported;
  bool facts_carried = false;
  at::Device device =
      context.parameters.empty() ? at::Device(at::kCPU) : context.parameters[0].device;
  bool has_peers = !context.members.alone();
  for (size_t b = 0; b < buckets.size(); ++b) {
    unreported.insert(unreported.end(), buckets[b].begin(), buckets[b].end());
    device = context.parameters[buckets[b].front()].device;
    ReductionSite site =
        site_of(kinds[b], device, &context.parameters[buckets[b].front()], b, context);
    site.hook = context.hook;
    site.last_of_hook = b == last_of_hook;
    auto reduction = context.choose(site);
    const ReductionTraits traits = reduction->traits();
    has_peers = traits.has_peers;
    BucketTrailer trailer;
    if (kinds[b] == Kind::kFlat && traits.carries_trailer) {
      const bool last = b + 1 == buckets.size();
      if (last) unreported.insert(unreported.end(), outside.begin(), outside.end());
      if (last) outside.clear();
      const int facts = last && has_peers ? facts_on(device, context) : 0;
      facts_carried = facts > 0;
      trailer = BucketTrailer(std::exchange(unreported, {}), facts);
    }
    plan.entries.push_back(make_entry(kinds[b], buckets[b], std::move(trailer), device, site,
                                      std::move(reduction), plan.places, context));
  }
  unreported.insert(unreported.end(), outside.begin(), outside.end());
  // Ranks that agree on a plan without buckets still have to hear of a parameter that one of them
  // unfreezes.
  const int facts = has_peers ? facts_on(device, context) : 0;
  if (!unreported.empty() || (facts > 0 && !facts_carried)) {
    if (buckets.empty() && !unreported.empty())
      device = context.parameters[unreported.front()].device;
    const ReductionSite site = site_of(Kind::kMaskOnly, device, nullptr, buckets.size(), context);
    plan.entries.push_back(make_entry(Kind::kMaskOnly, {}, BucketTrailer(unreported, facts), device,
                                      site, context.choose(site), plan.places, context));
  }
  const bool more_follows = context.options.check_finite || plan.has_later_messages();
  plan.last_at_end = plan.watches_unplanned ||
                     ((more_follows || context.options.skip_failed_steps) && plan.carries_facts());
}

std::vector<PlannedBucket> build_late_round(const std::vector<int64_t>& parameters,
                                            const std::vector<Place>& places,
                                            ReducerContext& context) {
  std::vector<PlannedBucket> round;
  const auto infos = parameter_infos(context, places);
  for (const auto& members : assign_buckets(infos, parameters, context.options.limits).buckets) {
    const Parameter& first = context.parameters[members.front()];
    Kind kind = Kind::kFlat;
    if (places[members.front()].sparse) {
      kind = Kind::kSparse;
    } else if (members.size() == 1 && may_be_in_place(context, first, places[members.front()])) {
      kind = Kind::kInPlace;
    }
    ReductionSite site = site_of(kind, first.device, &first, 0, context);
    round.push_back(
        make_entry(kind, members, {}, first.device, site, context.choose(site), places, context));
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
  const std::string backward =
      ", of backward number " + std::to_string(context.statistics.get().backwards + 1);
  if (slots.empty()) return text + " (used-parameter mask)" + backward;
  text += " (parameter '" + context.parameters[slots.front().parameter].name + "'";
  if (slots.size() > 1) {
    text += " to '" + context.parameters[slots.back().parameter].name + "', " +
            std::to_string(slots.size()) + " parameters";
  }
  return text + ", " + std::to_string(entry.message.numel()) + " elements)" + backward;
}

}  // namespace apex::parallel::detail
