#include <algorithm>
#include <iterator>
#include <limits>

#include <ATen/Functions.h>

#include <apex/error.h>

#include "comm/collectives.h"
#include "parallel/reducer_state.h"

namespace apex::parallel::detail {

// Note [Self-tuning buckets]
//
// With auto_buckets, the plan that was learnt is observed for a few backwards: when each gradient is ready,
// and how long a backward takes. Then all-reduces of two sizes are timed, and assign_buckets_by_time()
// proposes plans, for the latency that was measured, for a fourth and for four times of it. A model that
// leaves out what it costs to communicate while computing must not have the last word, so plans with
// buckets of 1, 4, 10 and 25 MiB, small ones first, are proposed beside them. Each is tried for a few backwards,
// and the one that was fastest on the slowest rank is kept; the learnt one, unless another is clearly
// faster. After a thousand backwards it is all done anew. Everything that leads to a decision is exchanged,
// so that ranks decide alike; they are asked at the same backward, since they all count the same ones.
//
// Results do not depend on the plan but for rounding: a gradient is summed over the same ranks.

namespace {

constexpr int64_t kSmallProbe = int64_t{1} << 10;  // float32 elements
constexpr int64_t kLargeProbe = int64_t{1} << 20;
constexpr int kProbes = 4;
constexpr int64_t kMebi = int64_t{1} << 20;
constexpr int64_t kCaps[] = {kMebi, 4 * kMebi, 10 * kMebi, 25 * kMebi};  // bytes
constexpr int64_t kMostPlans = 1 + 3 + std::size(kCaps);     // in force, by the model, by size

}  // namespace

double ReducerState::seconds_since_begin() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
}

void ReducerState::note_gradient(size_t index) {
  if (!options_.auto_buckets || !tuner_.observing()) return;
  tuner_.gradient_at(index, seconds_since_begin());
}

ReduceCost ReducerState::probe_cost() {
  const GroupPtr& group = groups_.front();
  const at::Device device = control_device(group, parameters_.front().variable.device());
  int64_t total = 0;
  for (const Parameter& parameter : parameters_) total += parameter.variable.numel();
  const int64_t sizes[] = {kSmallProbe, std::max(2 * kSmallProbe, std::min(total, kLargeProbe))};
  at::Tensor seconds = at::zeros({2}, at::kDouble);
  const std::string what = "timing of an all-reduce";
  for (int i = 0; i < 2; ++i) {
    std::vector<at::Tensor> message{at::zeros({sizes[i]}, at::TensorOptions(device).dtype(at::kFloat))};
    double best = std::numeric_limits<double>::infinity();
    for (int probe = 0; probe < kProbes; ++probe) {
      const auto begin = std::chrono::steady_clock::now();
      wait_collective(call_collective(what, *group, [&] { return group->allreduce(message); }), what,
                      *group);
      if (!device.is_cpu()) message[0].narrow(0, 0, 1).cpu();  // until the stream is through
      const double took =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      best = std::min(best, took);
    }
    seconds[i] = best;
  }
  const at::Tensor agreed = agree(seconds, c10d::ReduceOp::MAX, what);  // the slowest rank
  const double small = agreed[0].item<double>();
  const double large = agreed[1].item<double>();
  ReduceCost cost;
  cost.seconds_per_byte =
      std::max(0.0, (large - small) / (4.0 * static_cast<double>(sizes[1] - sizes[0])));
  cost.latency_s = std::max(1e-6, small - cost.seconds_per_byte * 4.0 * kSmallProbe);
  // One core reads and writes about 10 GB/s; a hundredth of it more or less moves no boundary.
  cost.copy_seconds_per_byte = device.is_cpu() ? 1e-10 : 0;
  return cost;
}

std::vector<BucketPlan> ReducerState::propose_plans(const std::vector<double>& ready_s) {
  const ReduceCost measured = probe_cost();
  // The ready order of the plan in force, by the times that were observed.
  std::vector<int64_t> order;
  for (const auto& bucket : plan_.buckets) order.insert(order.end(), bucket.begin(), bucket.end());
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t left, int64_t right) { return ready_s[left] < ready_s[right]; });
  std::vector<double> times;
  for (const int64_t index : order) times.push_back(ready_s[index]);
  std::vector<BucketPlan> plans{plan_};
  const auto propose = [&](BucketPlan plan) {
    if (std::find(plans.begin(), plans.end(), plan) == plans.end()) plans.push_back(std::move(plan));
  };
  for (const double factor : {1.0, 4.0, 0.25}) {
    ReduceCost cost = measured;
    cost.latency_s *= factor;
    propose(assign_buckets_by_time(parameter_infos(), order, times, cost).plan);
  }
  for (const int64_t cap : kCaps) {
    BucketLimits limits;
    limits.unit = BucketLimits::Unit::kBytes;
    limits.cap = cap;
    limits.first_cap = kMebi;
    propose(assign_buckets(parameter_infos(), order, limits));
  }
  return broadcast_plans(plans);
}

/// Rank 0's plans, on every rank: floating point may not be the same on all machines.
std::vector<BucketPlan> ReducerState::broadcast_plans(const std::vector<BucketPlan>& plans) {
  const GroupPtr& group = groups_.front();
  const auto count = static_cast<int64_t>(parameters_.size());
  // [kMostPlans, 2, count]: members of all buckets in order, and where buckets end; -1 behind the last.
  at::Tensor code = at::full({kMostPlans, 2, count}, -1, at::kLong);
  auto fields = code.accessor<int64_t, 3>();
  for (size_t p = 0; p < plans.size() && p < kMostPlans; ++p) {
    int64_t member = 0;
    for (const auto& bucket : plans[p].buckets) {
      for (const int64_t index : bucket) {
        fields[p][0][member] = index;
        fields[p][1][member++] = 0;
      }
      if (!bucket.empty()) fields[p][1][member - 1] = 1;
    }
  }
  if (world_size_ > 1) {
    const at::Device device = control_device(group, parameters_.front().variable.device());
    std::vector<at::Tensor> message{code.to(device)};
    const std::string what = "broadcast of bucket plans";
    wait_collective(call_collective(what, *group, [&] { return group->broadcast(message); }), what,
                    *group);
    code = message[0].cpu();
  }
  const auto agreed = code.accessor<int64_t, 3>();
  std::vector<BucketPlan> result;
  for (int64_t p = 0; p < kMostPlans && count > 0 && agreed[p][0][0] >= 0; ++p) {
    BucketPlan plan;
    std::vector<int64_t> bucket;
    for (int64_t i = 0; i < count && agreed[p][0][i] >= 0; ++i) {
      bucket.push_back(agreed[p][0][i]);
      if (agreed[p][1][i] == 1) plan.buckets.push_back(std::exchange(bucket, {}));
    }
    result.push_back(std::move(plan));
  }
  return result;
}

void ReducerState::adopt(const BucketPlan& plan) {
  if (plan == plan_) return;
  plan_ = plan;
  build_buckets();
}

void ReducerState::tune() {
  if (!options_.auto_buckets || world_size_ == 1 || parameters_.empty()) return;
  BucketTuner::Ask ask = tuner_.backward_took(seconds_since_begin());
  if (ask == BucketTuner::Ask::kPropose) {
    const at::Tensor ready = agree(at::tensor(tuner_.ready_s(), at::kDouble) / world_size_,
                                   c10d::ReduceOp::SUM, "exchange of ready times");
    const double* values = ready.const_data_ptr<double>();
    ask = tuner_.propose(propose_plans(std::vector<double>(values, values + ready.numel())));
  }
  if (ask == BucketTuner::Ask::kSwitch) adopt(tuner_.candidate());
  if (ask == BucketTuner::Ask::kDecide) {
    const at::Tensor slowest = agree(at::tensor(tuner_.medians(), at::kDouble),
                                     c10d::ReduceOp::MAX, "exchange of backward times");
    const double* seconds = slowest.const_data_ptr<double>();
    tuner_.decide(std::vector<double>(seconds, seconds + slowest.numel()));
    adopt(tuner_.candidate());
    backwards_with_plan_ = 0;
    ++statistics_.plans_tuned;
  }
}

void ReducerState::preset_plan(const BucketPlan& plan) {
  std::vector<bool> seen(parameters_.size(), false);
  for (const auto& bucket : plan.buckets) {
    for (const int64_t index : bucket) {
      if (index < 0 || static_cast<size_t>(index) >= parameters_.size() || seen[index]) {
        throw InvalidArgument("a bucket plan names parameter " + std::to_string(index) +
                              ", which is not one of the " + std::to_string(parameters_.size()) +
                              " parameters, or named twice");
      }
      seen[index] = true;
      const Parameter& first = parameters_[bucket.front()];
      const at::Tensor& variable = parameters_[index].variable;
      if (variable.scalar_type() != first.variable.scalar_type() ||
          variable.device() != first.variable.device()) {
        throw InvalidArgument("a bucket plan puts parameters '" + first.name + "' and '" +
                              parameters_[index].name +
                              "' together, which differ in dtype or device");
      }
    }
  }
  std::vector<BucketPlan> agreed = broadcast_plans({plan});
  preset_ = agreed.empty() ? BucketPlan{} : std::move(agreed.front());
  refresh(ReasonToLeave::kPlan);
}

}  // namespace apex::parallel::detail
