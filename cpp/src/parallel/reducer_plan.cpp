#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <utility>

#include <ATen/Functions.h>

#include "comm/collectives.h"
#include "parallel/reducer_state.h"

namespace apex::parallel::detail {

namespace {

/// A bucket of one parameter is reduced in place from this size on: below, a copy into a flat bucket
/// that also carries usage numbers is cheaper than a usage bucket of its own.
constexpr int64_t kInPlaceBytes = int64_t{64} << 10;

/// For how many sets of trainable parameters plans are kept; a new one more, and all are forgotten.
constexpr size_t kMostSets = 4;

constexpr const char* kExchangeOfFacts = "exchange of used parameters";
constexpr const char* kBroadcastOfOrder = "broadcast of the bucket order";

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

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

// Note [Usage travels with the gradients]
//
// A rank that produced no gradient for a parameter has to know whether another rank did: if so it
// needs the average, if not its .grad must stay as it is (None, for an optimizer that skips such
// parameters). Asking in a collective of its own would cost every step of every user. Instead, each
// flat bucket ends with one number per parameter, 1 or 0, which is summed with the gradients: those of
// its own members and those of the buckets in place (or sparse) that were launched since the previous
// flat bucket and have no room for it. If the plan ends with such a bucket, a bucket of numbers only
// follows. A rank reads the numbers only if it missed a gradient itself; a rank that has all of them
// needs to know nothing. So the ordinary step pays a few bytes and no wait.
//
// Behind the mask the last message carries facts about the step that each rank is in; see
// Note [Ranks that are out of step] and Note [Parameters that are frozen or unfrozen].
//
// Parameters outside the plan (no rank had a gradient when the plan was learnt) are reported by the
// last bucket, which is then launched at the end of backward and read by every rank: if one of them
// did get a gradient somewhere, every rank learns of it in the same step, they are reduced in a second
// round, and are part of the plan from then on.

std::vector<ParameterInfo> ReducerState::parameter_infos() const {
  std::vector<ParameterInfo> infos;
  infos.reserve(parameters_.size());
  for (const Parameter& parameter : parameters_) {
    infos.push_back(
        {parameter.variable.numel(), parameter.dtype, parameter.device, parameter.sparse});
  }
  return infos;
}

void ReducerState::forget_plan() {
  learning_ = true;
  plan_for_once_ = false;
  kept_plans_.clear();
  set_in_force_.reset();
  recurrence_.forget();
  KeptPlan none;
  exchange_plan(none);
  next_launch_ = 0;
  clock_ = 0;
  for (Parameter& parameter : parameters_) parameter.last_fired = 0;
}

// Note [Sets that come again]
//
// A program that trains two models in turn freezes and unfreezes the same parameters again and again. Each set of
// trainable parameters has its plan, and plans are kept. Which one a backward takes has to be known before its
// first message, on all ranks, while a rank knows only what it has frozen itself. But all ranks know which
// sets were agreed on so far, and in which order: so all expect the same set, the one that came at this place
// of the last period, and take its plan. Where a rank finds something else frozen, it asks for a new plan, as
// Note [Parameters that are frozen or unfrozen] has it.

/// Swaps the plan in force.
void ReducerState::exchange_plan(KeptPlan& other) {
  other.places.resize(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    std::swap(static_cast<Place&>(parameters_[i]), other.places[i]);
  }
  std::swap(plan_, other.plan);
  entries_.swap(other.entries);
  std::swap(watches_unplanned_, other.watches_unplanned);
  std::swap(last_at_end_, other.last_at_end);
  std::swap(preset_in_force_, other.preset_in_force);
  std::swap(last_hooked_, other.last_hooked);
  std::swap(backwards_with_plan_, other.backwards);
  std::swap(tuner_, other.tuner);
}

/// Puts the plan in force aside and takes up that of `set`; or none, to agree on a new one.
void ReducerState::switch_plan(std::optional<size_t> set) {
  if (set == set_in_force_) return;
  for (Entry& entry : entries_) reset(entry);
  if (set_in_force_) {
    exchange_plan(kept_plans_[*set_in_force_]);
  } else {
    KeptPlan none;
    exchange_plan(none);
  }
  if (set) exchange_plan(kept_plans_[*set]);
  set_in_force_ = set;
  learning_ = !set;
}

void ReducerState::take_expected_plan() {
  if (learning_ || !set_in_force_ || !carries_facts()) return;
  if (const auto next = recurrence_.next()) switch_plan(next);
}

/// Before a backward: takes the plan that all ranks expect; or, where ranks hear nothing of each other, the plan of
/// what is trainable here, which has to be the same on all.
void ReducerState::choose_plan() {
  look_back_on_failure();
  take_expected_plan();
  const auto differs = [&](const Parameter& parameter) {
    return parameter.trainable_here != (parameter.trainable && owns(parameter));
  };
  asks_to_relearn_ = !learning_ && std::any_of(parameters_.begin(), parameters_.end(), differs);
  if (!asks_to_relearn_ || carries_facts() || defers_) return;
  switch_plan(find_set(&Place::trainable_here, trainable_now()));
  asks_to_relearn_ = false;
}

/// The set for which `field` has these values.
std::optional<size_t> ReducerState::find_set(bool Place::*field, const std::vector<bool>& values) const {
  for (size_t set = 0; set < kept_plans_.size(); ++set) {
    bool same = true;
    for (size_t i = 0; i < parameters_.size() && same; ++i) {
      const Place& place = set == set_in_force_ ? parameters_[i] : kept_plans_[set].places[i];
      same = place.*field == values[i];
    }
    if (same) return set;
  }
  return std::nullopt;
}

std::vector<bool> ReducerState::trainable_now() const {
  std::vector<bool> now;
  for (const Parameter& parameter : parameters_) now.push_back(parameter.trainable && owns(parameter));
  return now;
}

std::vector<bool> ReducerState::trainable_anywhere() const {
  std::vector<bool> anywhere;
  for (const Parameter& parameter : parameters_) anywhere.push_back(parameter.trainable_anywhere);
  return anywhere;
}

/// Takes up the plan that was kept for the set of parameters that are trainable somewhere, if it holds all that
/// are `ready`, and returns true; else makes room for a new one. The same on every rank.
bool ReducerState::take_kept_plan(const std::vector<Place>& agreed, const std::vector<int64_t>& ready) {
  std::vector<bool> anywhere;
  for (const Place& place : agreed) anywhere.push_back(place.trainable_anywhere);
  std::optional<size_t> set = find_set(&Place::trainable_anywhere, anywhere);
  if (set && set != set_in_force_ && !plan_for_once_) {
    const std::vector<Place>& kept = kept_plans_[*set].places;
    const bool fits = std::all_of(ready.begin(), ready.end(), [&](int64_t i) {
      return kept[i].bucket >= 0 && kept[i].sparse_dim == agreed[i].sparse_dim;
    });
    if (fits) {
      switch_plan(set);
      for (size_t i = 0; i < agreed.size(); ++i) parameters_[i].trainable_here = agreed[i].trainable_here;
      return true;
    }
  }
  if (!set && kept_plans_.size() == kMostSets) {
    kept_plans_.clear();
    set_in_force_.reset();
    recurrence_.forget();
  }
  if (!set) {
    set = kept_plans_.size();
    kept_plans_.emplace_back();
  }
  if (set != set_in_force_) switch_plan(std::nullopt);
  kept_plans_[*set] = {};
  set_in_force_ = set;
  for (size_t i = 0; i < agreed.size(); ++i) static_cast<Place&>(parameters_[i]) = agreed[i];
  return false;
}

/// Lets go of a plan that the other ranks may not let go of. They find out in the next backward; see
/// Note [Carried through].
void ReducerState::leave_plan(ReasonToLeave reason) {
  take_expected_plan();  // as the others do
  if (carries_facts() && carried_.empty()) {
    carried_ = std::move(entries_);
    carried_hook_ = comm_hook_;
    reason_to_leave_ = reason;
  }
  forget_plan();
}

/// Of the settings that may change between backwards, those that all ranks must share.
std::string ReducerState::describe_settings() const {
  return (comm_hook_ ? "the communication hook '" + comm_hook_->name() + "'" : std::string("no communication hook")) +
         (defers_ ? ", an OverlappedOptimizer (set_deferred)" : "");
}

/// What this rank tells the others so that all make the same plan: [4 * count + facts + 2], for each parameter
/// whether there is a gradient, over how many of its dimensions it is sparse, how often it fired, and whether it
/// is trainable; then the facts of this step, and a fingerprint of what may change later, with both signs.
at::Tensor ReducerState::plan_facts(const StepFacts& step) const {
  const auto count = static_cast<int64_t>(parameters_.size());
  at::Tensor facts = at::zeros({4 * count + StepFacts::kCount + 2}, at::kInt);
  int32_t* const out = facts.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor& grad = parameters_[i].variable.grad();
    out[i] = used_[i];
    const bool sparse = used_[i] && grad.defined() && grad.layout() == at::kSparse;
    out[count + i] = sparse ? static_cast<int32_t>(grad.sparse_dim()) : 0;
    out[2 * count + i] = parameters_[i].fired;
    out[3 * count + i] = parameters_[i].trainable && owns(parameters_[i]);
  }
  const uint32_t bits = step.encode();
  for (int i = 0; i < StepFacts::kCount; ++i) out[4 * count + i] = static_cast<int32_t>((bits >> i) & 1U);
  const auto settings = static_cast<int32_t>(std::hash<std::string>()(describe_settings()) & 0x7fffffffU);
  out[4 * count + StepFacts::kCount] = settings;
  out[4 * count + StepFacts::kCount + 1] = -settings;
  return facts;
}

/// [count]: parameters by their last firing, -1 where there are no more.
at::Tensor ReducerState::ready_order() const {
  std::vector<int64_t> order;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].fired > 0) order.push_back(static_cast<int64_t>(i));
  }
  if (!options_.delay_allreduce) {
    std::sort(order.begin(), order.end(), [&](int64_t left, int64_t right) {
      return parameters_[left].last_fired < parameters_[right].last_fired;
    });
  }
  order.resize(parameters_.size(), -1);
  return at::tensor(order, at::kLong);
}

/// Issues the exchange of these two; the results are in the messages when the works are done.
ReducerState::PlanExchange ReducerState::start_plan_exchange(const StepFacts& step) {
  const GroupPtr& group = groups_.front();
  const at::Device device = control_device(group, parameters_.front().variable.device());
  PlanExchange exchange;
  exchange.facts = {plan_facts(step).to(device)};
  exchange.order = {ready_order().to(device)};
  if (world_size_ == 1) return exchange;
  c10d::AllreduceOptions maximum;
  maximum.reduceOp = c10d::ReduceOp::MAX;
  exchange.facts_work = call_collective(kExchangeOfFacts, *group,
                                        [&] { return group->allreduce(exchange.facts, maximum); });
  exchange.order_work = call_collective(kBroadcastOfOrder, *group,
                                        [&] { return group->broadcast(exchange.order); });
  return exchange;
}

void ReducerState::learn() {
  const auto count = static_cast<int64_t>(parameters_.size());
  if (count == 0) {
    learning_ = false;
    return;
  }
  PlanExchange exchange = start_plan_exchange(facts_of_step());
  if (world_size_ > 1) {
    wait_collective(exchange.facts_work, kExchangeOfFacts, *groups_.front());
    wait_collective(exchange.order_work, kBroadcastOfOrder, *groups_.front());
  }
  const at::Tensor facts = exchange.facts.front().cpu();
  const at::Tensor order_tensor = exchange.order.front().cpu();
  const at::Tensor table = facts.narrow(0, 0, 4 * count).view({4, count});
  const auto agreed = table.accessor<int32_t, 2>();
  uint32_t bits = 0;
  for (int i = 0; i < StepFacts::kCount; ++i) {
    bits |= facts[4 * count + i].item<int32_t>() != 0 ? uint32_t{1} << i : 0;
  }
  std::vector<bool> anywhere;
  used_by_any_.assign(parameters_.size(), 0);
  for (int64_t i = 0; i < count; ++i) {
    used_by_any_[i] = agreed[0][i] != 0;
    anywhere.push_back(agreed[3][i] != 0);
  }
  if (world_size_ > 1) {
    refuse_failed_step(SeenFacts(bits));
    const at::Tensor settings = facts.narrow(0, 4 * count + StepFacts::kCount, 2);
    if (settings[0].item<int32_t>() != -settings[1].item<int32_t>()) {
      told_ = true;
      throw RankMismatch("rank " + std::to_string(rank_) + " has " + describe_settings() +
                         ", another rank has not: register the same on every rank");
    }
    if (options_.check_steps.value_or(control_device(groups_.front(), parameters_.front().device).is_cpu())) {
      compare_steps(SeenFacts(bits), anywhere);
    }
  }

  const int64_t* agreed_order = order_tensor.const_data_ptr<int64_t>();
  std::vector<int64_t> ready;
  std::vector<bool> listed(count, false);
  for (int64_t i = 0; i < count && agreed_order[i] >= 0; ++i) {
    ready.push_back(agreed_order[i]);
    listed[agreed_order[i]] = true;
  }
  // Used elsewhere but not on rank 0: in the order in which backward usually goes.
  for (int64_t i = count - 1; i >= 0; --i) {
    if (agreed[0][i] && !listed[i]) ready.push_back(i);
  }
  std::vector<Place> places(count);
  for (int64_t i = 0; i < count; ++i) {
    places[i].sparse = agreed[1][i] != 0;
    places[i].sparse_dim = agreed[1][i];
    places[i].trainable_here = parameters_[i].trainable && owns(parameters_[i]);
    places[i].trainable_anywhere = anywhere[i];
    // A rank goes by its own count; one that has none yet, by that of the others.
    const int32_t count_seen = parameters_[i].fired > 0 ? parameters_[i].fired : agreed[2][i];
    places[i].expected = std::max<int32_t>(1, count_seen);
  }
  // Frozen after it accumulated a local gradient: reduced now, and not waited for in later steps.
  plan_for_once_ = std::any_of(ready.begin(), ready.end(), [&](int64_t i) { return !anywhere[i]; });
  ++statistics_.plans_learnt;
  learning_ = asks_to_relearn_ = false;
  if (take_kept_plan(places, ready)) return;

  BucketLimits limits = options_.limits;
  if (options_.delay_allreduce) limits.cap = limits.first_cap = std::numeric_limits<int64_t>::max();
  plan_ = assign_buckets(parameter_infos(), ready, limits, options_.trigger_parameters);
  const bool preset = holds_same(preset_, plan_);
  if (preset) plan_ = preset_;
  preset_in_force_ = preset;
  build_buckets();
  tuner_.reset(parameters_.size());
  if (preset) tuner_.keep(plan_);
  learning_ = false;  // switch_plan() may have set it
  backwards_with_plan_ = 0;
}

at::Tensor ReducerState::allocate_registered(const GroupPtr& group, int64_t numel,
                                             const at::TensorOptions& options) {
  const at::Device device = options.device();
  std::string reason = "the group has no backend for " + device.str();
  if (has_backend(*group, device.type())) {
    const auto backend = group->getBackend(device.type());
    try {
      if (backend->supportsTensorAlloc(device.index())) {
        at::Tensor buffer = backend->allocateTensor(static_cast<long>(numel), options);
        ++statistics_.buffers_registered;
        return buffer.zero_();
      }
      reason = backend->getBackendName() + " has no memory of its own here";
    } catch (const std::exception& error) {
      reason = backend->getBackendName() + " could not allocate it: " + first_line(error.what());
    }
  }
  TORCH_WARN_ONCE("registered_buffers: buckets are in torch's memory instead, since ", reason);
  return at::zeros({numel}, options);
}

std::function<at::Tensor(int64_t, const at::TensorOptions&)> ReducerState::allocator_for(
    size_t bucket) {
  if (!options_.registered_buffers) return nullptr;
  return [this, bucket](int64_t numel, const at::TensorOptions& options) {
    return allocate_registered(group_of(bucket), numel, options);
  };
}

Bucket ReducerState::make_bucket(const std::vector<int64_t>& members,
                                 std::vector<int64_t> reported, bool may_be_in_place, int facts) {
  std::vector<at::Tensor> variables;
  for (const int64_t index : members) variables.push_back(parameters_[index].variable);
  const Parameter& first = parameters_[members.front()];
  Bucket::Kind kind = Bucket::Kind::kFlat;
  if (first.sparse) {
    kind = Bucket::Kind::kSparse;
  } else if (may_be_in_place && members.size() == 1 &&
             first.variable.is_non_overlapping_and_dense()) {
    kind = Bucket::Kind::kInPlace;
  }
  if (kind != Bucket::Kind::kFlat) reported.clear();
  BucketOptions options;
  options.gradient_as_bucket_view = options_.gradient_as_bucket_view;
  options.allreduce_always_fp32 = options_.allreduce_always_fp32;
  options.sparse_dim = first.sparse_dim;
  options.facts = kind == Bucket::Kind::kFlat ? facts : 0;
  options.allocate = allocator_for(entries_.size());
  return Bucket(kind, members, variables, std::move(reported), first.device, options);
}

/// How many facts the last bucket carries, if it lies on `device`.
int ReducerState::facts_on(at::Device device) const {
  if (world_size_ == 1) return 0;
  return device.is_cpu() || options_.check_steps.value_or(false) ? StepFacts::kCount : 0;
}

void ReducerState::build_buckets() {
  entries_.clear();
  for (Parameter& parameter : parameters_) parameter.bucket = -1;
  const size_t count = plan_.buckets.size();

  auto casts = [&](const Parameter& parameter) {
    return options_.allreduce_always_fp32 &&
           (parameter.dtype == at::kHalf || parameter.dtype == at::kBFloat16);
  };
  // Whether a bucket can be reduced in place is decided from the back: a small one only if a flat
  // bucket follows that carries its usage number.
  std::vector<bool> in_place(count, false);
  bool flat_follows = false;
  for (size_t b = count; b-- > 0;) {
    const auto& members = plan_.buckets[b];
    const Parameter& first = parameters_[members.front()];
    const bool large =
        static_cast<int64_t>(first.variable.nbytes()) >= kInPlaceBytes || flat_follows;
    in_place[b] = members.size() == 1 && !first.sparse && !casts(first) && large;
    if (members.size() > 1 || (!in_place[b] && !first.sparse)) flat_follows = true;
  }

  std::vector<int64_t> unplanned;
  if (!options_.static_graph) {
    std::vector<bool> planned(parameters_.size(), false);
    for (const auto& members : plan_.buckets) {
      for (const int64_t index : members) planned[index] = true;
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!planned[i] && parameters_[i].trainable_anywhere) unplanned.push_back(static_cast<int64_t>(i));
    }
  }
  watches_unplanned_ = !unplanned.empty();

  std::vector<int64_t> unreported;
  for (size_t b = 0; b < count; ++b) {
    const auto& members = plan_.buckets[b];
    for (size_t i = 0; i < members.size(); ++i) {
      parameters_[members[i]].bucket = static_cast<int64_t>(b);
      parameters_[members[i]].slot = i;
    }
    unreported.insert(unreported.end(), members.begin(), members.end());
    const bool flat = !in_place[b] && !parameters_[members.front()].sparse;
    // A communication hook sees gradients only, so with one the numbers travel apart.
    const bool carries = flat && !comm_hook_;
    const bool last = carries && b + 1 == count;
    if (last) {
      unreported.insert(unreported.end(), unplanned.begin(), unplanned.end());
      unplanned.clear();
    }
    entries_.emplace_back(make_bucket(members, carries ? unreported : std::vector<int64_t>{},
                                      in_place[b], last ? facts_on(parameters_[members.front()].device) : 0));
    if (carries) unreported.clear();
    entries_.back().members = static_cast<int64_t>(members.size());
  }
  unreported.insert(unreported.end(), unplanned.begin(), unplanned.end());
  // Ranks that agree on a plan without buckets still have to hear of a parameter that one of them unfreezes.
  const at::Device last_device = !entries_.empty() ? entries_.back().bucket.device()
                                 : parameters_.empty() ? at::Device(at::kCPU)
                                                       : parameters_.front().device;
  const bool facts_missing = facts_on(last_device) > 0 && !carries_facts();
  if (!unreported.empty() || facts_missing) {
    const size_t asking = unreported.empty() ? 0 : static_cast<size_t>(unreported.front());
    const at::Device device =
        entries_.empty() ? parameters_[asking].device : entries_.back().bucket.device();
    BucketOptions options;
    options.facts = facts_on(device);
    options.allocate = allocator_for(entries_.size());
    entries_.emplace_back(Bucket(Bucket::Kind::kUsage, {}, {}, unreported, device, options));
  }

  // A communication hook may have second phases.
  const auto is_sparse = [](const Entry& entry) { return entry.bucket.kind() == Bucket::Kind::kSparse; };
  const bool more_follows =
      options_.check_finite || comm_hook_ || std::any_of(entries_.begin(), entries_.end(), is_sparse);
  last_at_end_ = watches_unplanned_ || (more_follows && carries_facts());
  last_hooked_ = 0;
  for (size_t b = 0; b < entries_.size(); ++b) {
    Entry& entry = entries_[b];
    if (entry.goes_through_hook()) last_hooked_ = b;
    entry.pending = entry.members;
    // NCCL divides while it sums; others leave the division to us.
    const GroupPtr& group = group_of(b);
    const auto type = entry.bucket.device().type();
    entry.average_on_wire =
        options_.gradient_average && options_.gradient_predivide_factor == 1.0 &&
        entry.bucket.kind() != Bucket::Kind::kSparse && type == at::kCUDA &&
        has_backend(*group, type) && is_nccl(group->getBackend(type)->getBackendName());
  }
}

}  // namespace apex::parallel::detail
