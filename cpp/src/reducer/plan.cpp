// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include <ATen/Functions.h>

namespace apex::parallel::detail {

// Note [Parameters that a rank does not use]
//
// A rank without a gradient for a parameter must know whether another rank has one. If so, it needs
// the average. If not, its .grad must stay unchanged (None, for an optimizer that skips such
// parameters). So every rank's report contains its used-parameter mask, which a rank reads if it
// has no gradient for some parameter. A rank with all gradients does not need the masks, and on
// devices does not wait.
//
// Every rank also reads the masks while parameters are trainable that no rank used when the plan
// was recorded. If one of them has a gradient on some rank, every rank launches its bucket on
// demand after the reports, and the next backward records a plan that has it among the others.

namespace {

/// Number of backwards. GANs train their critic up to a hundred times per step of the generator.
constexpr int64_t kKeptFor = 128;

/// What one rank, or all ranks together, recorded of a parameter in a backward without a plan.
struct Recorded {
  int32_t sparse_dim = 0;  ///< number of sparse dimensions of its gradient; 0: dense
  int32_t fired = 0;       ///< how often its gradient was accumulated
  int32_t ready = 0;       ///< sorts parameters by the time of the last such gradient; 0: none
};
constexpr int64_t kNumbers = sizeof(Recorded) / sizeof(int32_t);

std::vector<Recorded> record_gradients(const BackwardPass& pass, const ReducerContext& context) {
  std::vector<Recorded> mine(context.parameters.size());
  for (size_t i = 0; i < mine.size(); ++i) {
    const at::Tensor& grad = context.parameters[i].variable.grad();
    if (pass.used[i] != 0 && grad.defined() && grad.layout() == at::kSparse)
      mine[i].sparse_dim = static_cast<int32_t>(grad.sparse_dim());
    mine[i].fired = pass.gradients[i].fired;
    const auto ready = context.options.delay_allreduce ? static_cast<int64_t>(i) + 1
                                                       : pass.gradients[i].last_fired;
    if (mine[i].fired > 0) mine[i].ready = static_cast<int32_t>(ready);
  }
  return mine;
}

/// The largest numbers of all ranks, and the order of rank 0. Collective.
std::vector<Recorded> combined(const std::vector<Recorded>& mine, const Membership& members) {
  const at::Tensor row = at::empty({static_cast<int64_t>(mine.size()) * kNumbers}, at::kInt);
  std::memcpy(row.mutable_data_ptr(), mine.data(), row.nbytes());
  const at::Tensor rows = members.all_gather("exchange of recorded gradients", row).wait();
  const auto* one = static_cast<const Recorded*>(rows.const_data_ptr());
  std::vector<Recorded> all(mine.size());
  for (int rank = 0; rank < members.size; ++rank) {
    for (Recorded& together : all) {
      together.sparse_dim = std::max(together.sparse_dim, one->sparse_dim);
      together.fired = std::max(together.fired, one->fired);
      if (rank == 0) together.ready = one->ready;
      ++one;
    }
  }
  return all;
}

}  // namespace

std::string Plan::describe_next(const BackwardPass& pass, const ReducerContext& context) const {
  if (pass.next_launch >= entries.size()) return {};
  std::vector<std::string> missing;
  for (const int64_t i : buckets.buckets[pass.next_launch]) {
    if (pass.gradients[i].fired < places[i].expected) missing.push_back(context.parameters[i].name);
  }
  std::string text = "; bucket " + std::to_string(pass.next_launch) + " is to be launched next";
  if (missing.empty()) return text;
  text += ", and waits for the gradient of '" + missing.front() + "'";
  if (missing.size() > 1) text += " and " + std::to_string(missing.size() - 1) + " more";
  return text + ", or for the end of backward";
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
  reset();
  for (size_t i = 0; i < places.size(); ++i) {
    if (!places[i].is_planned()) {
      watches_demand = watches_demand || (trainable[i] && !static_graph);
    } else if (places[i].bucket >= 0 && !trainable[i]) {
      --entries[places[i].bucket].pending;
    }
  }
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
      (left_ == ReasonToLeave::kParameters && plan_->kinds == context_.parameters.kinds()))
    left_ = ReasonToLeave::kNone;
  if (left_ != ReasonToLeave::kNone) return;
  // Another reducer may write the gradient of a parameter that this one does not own.
  const auto is_foreign = [&](size_t i) {
    return !context_.parameters.owns(context_.parameters[i]);
  };
  if (!follows && plan_->any_planned(is_foreign)) return leave(ReasonToLeave::kOwner);
  plan_->expect(trainable, context_.options.static_graph);
}

void PlanBook::record(const BackwardPass& pass, const std::vector<bool>& trainable) {
  const std::vector<Recorded> mine = record_gradients(pass, context_);
  const std::vector<Recorded> all = combined(mine, context_.members);
  std::vector<Place> places(all.size());
  std::vector<int64_t> order;
  for (size_t i = places.size(); i-- > 0;) {
    const bool is_recorded = all[i].fired > 0 || pass.used_by_any[i] != 0;
    if (!is_recorded && extended_ && extended_->has(i)) {
      places[i] = extended_->places[i];
      continue;
    }
    places[i].sparse_dim = all[i].sparse_dim;
    // A rank uses its own count, or the other ranks' count if it has none yet.
    places[i].expected = std::max(1, mine[i].fired > 0 ? mine[i].fired : all[i].fired);
    // A frozen parameter may have an older gradient. It is reduced on demand.
    if (trainable[i] && !places[i].is_sparse() && (all[i].ready > 0 || pass.used_by_any[i] != 0))
      order.push_back(static_cast<int64_t>(i));
  }
  // Parameters that rank 0 does not use come last, in the usual order of backward.
  std::stable_sort(order.begin(), order.end(), [&](int64_t left, int64_t right) {
    const auto at = [&](int64_t i) { return static_cast<uint32_t>(all[i].ready) - 1; };
    return at(left) < at(right);
  });
  if (extended_) {
    std::vector<int64_t> older;
    for (const auto& bucket : extended_->buckets.buckets)
      older.insert(older.end(), bucket.begin(), bucket.end());
    for (size_t i = 0; i < places.size(); ++i) {
      if (extended_->places[i].demanded) older.push_back(static_cast<int64_t>(i));
    }
    for (const int64_t i : older) {
      const bool is_new = std::find(order.begin(), order.end(), i) == order.end();
      if (is_new && !places[i].is_sparse()) order.push_back(i);
    }
  }
  fill(std::move(places), order);
  plan_->expect(trainable, context_.options.static_graph);
}

/// Replaces the plan. Its buckets on demand, for all parameters that are not in `order`, are
/// reduced without the hook.
void PlanBook::fill(std::vector<Place> places, const std::vector<int64_t>& order) {
  forget();
  same_for_ = 0;
  context_.statistics.add(&ReducerStatistics::plans_recorded);
  plan_ = std::make_unique<Plan>();
  plan_->kinds = context_.parameters.kinds();
  plan_->places = std::move(places);
  std::vector<ParameterInfo> infos;
  for (const Parameter& parameter : context_.parameters)
    infos.push_back({parameter.variable.numel(), parameter.kind.dtype, parameter.kind.device});
  BucketLimits limits = context_.options.limits;
  if (context_.options.delay_allreduce)
    limits.cap = limits.first_cap = std::numeric_limits<int64_t>::max();
  plan_->buckets = assign_buckets(infos, order, limits, context_.options.trigger_parameters);
  for (Place& place : plan_->places) {
    place.bucket = -1;
    place.demanded = false;
    plan_->has_sparse = plan_->has_sparse || place.is_sparse();
  }
  size_t number = 0;
  for (const auto& members : plan_->buckets.buckets) {
    for (size_t slot = 0; slot < members.size(); ++slot) {
      plan_->places[members[slot]].bucket = static_cast<int64_t>(number);
      plan_->places[members[slot]].slot = slot;
    }
    const bool is_last = number + 1 == plan_->buckets.buckets.size();
    plan_->entries.push_back(make_bucket(members, number++, context_.hook, is_last, context_));
  }
  plan_->carries_report = !plan_->entries.empty() && plan_->entries.back().message.has_tail();
  std::vector<int64_t> rest;
  for (auto i = static_cast<int64_t>(infos.size()) - 1; i >= 0; --i) {
    const bool has_gradient =
        at::isFloatingType(infos[i].dtype) || at::isComplexType(infos[i].dtype);
    if (has_gradient && !plan_->places[i].is_planned()) rest.push_back(i);
  }
  for (const auto& members : assign_buckets(infos, rest, context_.options.limits).buckets)
    plan_->on_demand.push_back(make_bucket(members, number++, nullptr, false, context_));
}

void PlanBook::served(const std::vector<bool>& trainable) {
  same_for_ = trainable == set_ ? same_for_ + 1 : 0;
  set_ = trainable;
  if (!plan_ || left_ != ReasonToLeave::kNone) return;
  const auto& places = plan_->places;
  const auto demanded = [](const Place& place) { return place.demanded; };
  if (std::any_of(places.begin(), places.end(), demanded)) {
    next_ = Next::kLarger;
  } else if (same_for_ >= kKeptFor && plan_->any_planned([&](size_t i) { return !trainable[i]; })) {
    next_ = Next::kSmaller;
  }
}

}  // namespace apex::parallel::detail
