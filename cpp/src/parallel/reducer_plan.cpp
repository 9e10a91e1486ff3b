#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include <ATen/Functions.h>

#include "parallel/collective.h"
#include "parallel/reducer_state.h"

namespace apex::parallel::detail {

namespace {

/// A bucket of one parameter is reduced in place from this size on: below, a copy into a flat bucket
/// that also carries usage numbers is cheaper than a usage bucket of its own.
constexpr int64_t kInPlaceBytes = int64_t{64} << 10;

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
// With check_steps a last number is the rank's count of forwards, modulo 8. (The count of backwards would
// not do: the nth backward of one rank always meets the nth of the others.)
//
// The last number but that one, of the last message, asks for a new plan; see
// Note [Parameters that are frozen or thawed].
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
  asks_to_relearn_ = false;
  plan_ = {};
  entries_.clear();
  next_launch_ = 0;
  clock_ = 0;
  watches_unplanned_ = false;
  for (Parameter& parameter : parameters_) {
    parameter.bucket = -1;
    parameter.expected = 1;
    parameter.last_fired = 0;
  }
}

void ReducerState::learn() {
  const auto count = static_cast<int64_t>(parameters_.size());
  const GroupPtr& group = groups_.front();
  const at::Device device = control_device(
      group, parameters_.empty() ? at::Device(at::kCPU) : parameters_.front().variable.device());

  // What any rank has used: [4, count], whether there is a gradient, over how many of its
  // dimensions it is sparse, how often it fired, and whether the parameter requires one.
  at::Tensor facts = at::zeros({4, count}, at::kInt);
  auto fact = facts.accessor<int32_t, 2>();
  for (int64_t i = 0; i < count; ++i) {
    const at::Tensor& grad = parameters_[i].variable.grad();
    fact[0][i] = used_[i];
    if (used_[i] && grad.defined() && grad.layout() == at::kSparse) {
      fact[1][i] = static_cast<int32_t>(grad.sparse_dim());
    }
    fact[2][i] = parameters_[i].fired;
    fact[3][i] = parameters_[i].trainable;
  }
  // Rank 0's order: [count], parameters by their last firing, -1 where there are no more.
  std::vector<int64_t> order;
  for (int64_t i = 0; i < count; ++i) {
    if (parameters_[i].fired > 0) order.push_back(i);
  }
  if (!options_.delay_allreduce) {
    std::sort(order.begin(), order.end(), [&](int64_t left, int64_t right) {
      return parameters_[left].last_fired < parameters_[right].last_fired;
    });
  }
  order.resize(count, -1);
  at::Tensor order_tensor = at::tensor(order, at::kLong);

  if (group->getSize() > 1 && count > 0) {
    std::vector<at::Tensor> message{facts.to(device)};
    c10d::AllreduceOptions maximum;
    maximum.reduceOp = c10d::ReduceOp::MAX;
    const auto facts_work = call_collective("exchange of used parameters", *group,
                                            [&] { return group->allreduce(message, maximum); });
    std::vector<at::Tensor> order_message{order_tensor.to(device)};
    const auto order_work = call_collective("broadcast of the bucket order", *group,
                                            [&] { return group->broadcast(order_message); });
    wait_collective(facts_work, "exchange of used parameters", *group);
    wait_collective(order_work, "broadcast of the bucket order", *group);
    facts = message[0].cpu();
    order_tensor = order_message[0].cpu();
  }

  const auto agreed = facts.accessor<int32_t, 2>();
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
  for (int64_t i = 0; i < count; ++i) {
    parameters_[i].sparse = agreed[1][i] != 0;
    parameters_[i].sparse_dim = agreed[1][i];
    parameters_[i].trainable_anywhere = agreed[3][i] != 0;
    // A rank goes by its own count; one that has none yet, by that of the others.
    const int32_t count_seen = parameters_[i].fired > 0 ? parameters_[i].fired : agreed[2][i];
    parameters_[i].expected = std::max<int32_t>(1, count_seen);
  }

  // Frozen after it accumulated a local gradient: reduced now, and not waited for in later steps.
  plan_for_once_ = std::any_of(ready.begin(), ready.end(),
                               [&](int64_t i) { return agreed[3][i] == 0; });

  BucketLimits limits = options_.limits;
  if (options_.delay_allreduce) limits.cap = limits.first_cap = std::numeric_limits<int64_t>::max();
  plan_ = assign_buckets(parameter_infos(), ready, limits, options_.trigger_parameters);
  const bool preset = holds_same(preset_, plan_);
  if (preset) plan_ = preset_;
  preset_in_force_ = preset;
  build_buckets();
  tuner_.reset(parameters_.size());
  if (preset) tuner_.keep(plan_);
  learning_ = false;
  backwards_with_plan_ = 0;
  asks_to_relearn_ = false;
  ++statistics_.plans_learnt;
}

at::Tensor ReducerState::allocate_registered(const GroupPtr& group, int64_t numel,
                                             const at::TensorOptions& options) {
  const at::Device device = options.device();
  std::string reason = "the group has no backend for " + device.str();
  if (group->hasBackendForDeviceType(device.type())) {
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
                                 std::vector<int64_t> reported, bool may_be_in_place,
                                 bool stamped, bool signals) {
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
  options.stamped = options_.check_steps && stamped && kind == Bucket::Kind::kFlat;
  options.signals = signals && kind == Bucket::Kind::kFlat && first.device.is_cpu();
  options.allocate = allocator_for(entries_.size());
  return Bucket(kind, members, variables, std::move(reported), first.device, options);
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
                                      in_place[b], carries, last));
    if (carries) unreported.clear();
    entries_.back().members = static_cast<int64_t>(members.size());
  }
  unreported.insert(unreported.end(), unplanned.begin(), unplanned.end());
  // Ranks that agree on a plan without buckets still have to hear of a parameter that one of them thaws.
  const bool only_signals = entries_.empty() && !parameters_.empty() && parameters_.front().device.is_cpu();
  if (!unreported.empty() || only_signals) {
    const size_t asking = unreported.empty() ? 0 : static_cast<size_t>(unreported.front());
    const at::Device device =
        entries_.empty() ? parameters_[asking].device : entries_.back().bucket.device();
    BucketOptions options;
    options.stamped = options_.check_steps;
    options.signals = device.is_cpu();
    options.allocate = allocator_for(entries_.size());
    entries_.emplace_back(Bucket(Bucket::Kind::kUsage, {}, {}, unreported, device, options));
  }

  for (size_t b = 0; b < entries_.size(); ++b) {
    Entry& entry = entries_[b];
    entry.pending = entry.members;
    // NCCL divides while it sums; others leave the division to us.
    const GroupPtr& group = group_of(b);
    const auto type = entry.bucket.device().type();
    entry.average_on_wire =
        options_.gradient_average && options_.gradient_predivide_factor == 1.0 &&
        entry.bucket.kind() != Bucket::Kind::kSparse && type == at::kCUDA &&
        group->hasBackendForDeviceType(type) && group->getBackend(type)->getBackendName() == "nccl";
  }
}

}  // namespace apex::parallel::detail
