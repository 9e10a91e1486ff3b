#include "reducer/plan_tuner.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include <ATen/Functions.h>

#include "comm/collectives.h"
#include "reducer/plan_agreement.h"

namespace apex::parallel::detail {

namespace {

constexpr int64_t kSmallProbe = int64_t{1} << 10;  // float32 elements
constexpr int64_t kLargeProbe = int64_t{1} << 20;
constexpr int kProbes = 4;
constexpr int64_t kMebi = int64_t{1} << 20;
constexpr int64_t kCaps[] = {kMebi, 4 * kMebi, 10 * kMebi, 25 * kMebi};  // bytes
static_assert(kMostPlans == 1 + 3 + std::size(kCaps), "in force, by the model, by size");

}  // namespace

void PlanTuner::began(std::optional<c10::Device>, size_t parameters) {
  begin_ = std::chrono::steady_clock::now();
  ready_s_.assign(parameters, 0.0);
}

void PlanTuner::gradient_ready(size_t parameter) { ready_s_[parameter] = seconds(); }

double PlanTuner::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
}

std::optional<BucketPlan> PlanTuner::after_backward(Plan& plan) {
  if (context_.members.alone() || context_.parameters.empty()) return std::nullopt;
  BucketTuner& tuner = plan.tuner;
  if (tuner.observing()) {
    for (size_t i = 0; i < ready_s_.size(); ++i) {
      if (ready_s_[i] > 0) tuner.gradient_at(i, ready_s_[i]);
    }
  }
  const auto agree = [&](const std::vector<double>& mine, c10d::ReduceOp::RedOpType op, const char* what) {
    const at::Tensor agreed = context_.members.all_reduce(what, at::tensor(mine, at::kDouble), op).wait();
    const double* values = agreed.const_data_ptr<double>();
    return std::vector<double>(values, values + agreed.numel());
  };
  BucketTuner::Ask ask = tuner.backward_took(seconds());
  if (ask == BucketTuner::Ask::kPropose) {
    std::vector<double> ready = agree(tuner.ready_s(), c10d::ReduceOp::SUM, "exchange of ready times");
    for (double& time : ready) time /= context_.members.size;
    ask = tuner.propose(propose(plan, ready));
  }
  if (ask == BucketTuner::Ask::kSwitch) return tuner.candidate();
  if (ask != BucketTuner::Ask::kDecide) return std::nullopt;
  tuner.decide(agree(tuner.medians(), c10d::ReduceOp::MAX, "exchange of backward times"));
  plan.backwards = 0;
  context_.statistics.add(&ReducerStatistics::plans_tuned);
  return tuner.candidate();
}

/// Of an all-reduce, on the slowest rank.
ReduceCost PlanTuner::measure_cost() const {
  const Membership& members = context_.members;
  const at::Device device = members.control_device();
  int64_t total = 0;
  for (const Parameter& parameter : context_.parameters) total += parameter.variable.numel();
  const int64_t sizes[] = {kSmallProbe, std::max(2 * kSmallProbe, std::min(total, kLargeProbe))};
  at::Tensor seconds = at::zeros({2}, at::kDouble);
  const std::string what = "timing of an all-reduce";
  for (int i = 0; i < 2; ++i) {
    const at::Tensor message = at::zeros({sizes[i]}, at::TensorOptions(device).dtype(at::kFloat));
    double best = std::numeric_limits<double>::infinity();
    for (int probe = 0; probe < kProbes; ++probe) {
      const auto begin = std::chrono::steady_clock::now();
      run_collective(what, *members.control(), [&] { return issue_all_reduce(what, *members.control(), message); });
      if (!device.is_cpu()) message.narrow(0, 0, 1).cpu();  // until the stream is through
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    seconds[i] = best;
  }
  const at::Tensor agreed = members.all_reduce(what, seconds, c10d::ReduceOp::MAX).wait();
  const double small = agreed[0].item<double>();
  const double large = agreed[1].item<double>();
  ReduceCost cost;
  cost.seconds_per_byte = std::max(0.0, (large - small) / (4.0 * static_cast<double>(sizes[1] - sizes[0])));
  cost.latency_s = std::max(1e-6, small - cost.seconds_per_byte * 4.0 * kSmallProbe);
  // One core reads and writes about 10 GB/s; a hundredth of it more or less moves no boundary.
  cost.copy_seconds_per_byte = device.is_cpu() ? 1e-10 : 0;
  return cost;
}

std::vector<BucketPlan> PlanTuner::propose(const Plan& plan, const std::vector<double>& ready_s) const {
  const ReduceCost measured = measure_cost();
  // The ready order of the plan in force, by the times that were observed.
  std::vector<int64_t> order;
  for (const auto& bucket : plan.buckets.buckets) order.insert(order.end(), bucket.begin(), bucket.end());
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t left, int64_t right) { return ready_s[left] < ready_s[right]; });
  std::vector<double> times;
  for (const int64_t index : order) times.push_back(ready_s[index]);
  const auto infos = parameter_infos(context_, plan.places);
  std::vector<BucketPlan> plans{plan.buckets};
  const auto add = [&](BucketPlan one) {
    if (std::find(plans.begin(), plans.end(), one) == plans.end()) plans.push_back(std::move(one));
  };
  for (const double factor : {1.0, 4.0, 0.25}) {
    ReduceCost cost = measured;
    cost.latency_s *= factor;
    add(assign_buckets_by_time(infos, order, times, cost).plan);
  }
  for (const int64_t cap : kCaps) {
    BucketLimits limits;
    limits.unit = BucketLimits::Unit::kBytes;
    limits.cap = cap;
    limits.first_cap = kMebi;
    add(assign_buckets(infos, order, limits));
  }
  return broadcast_plans(context_.members, plans, static_cast<int64_t>(context_.parameters.size()));
}

}  // namespace apex::parallel::detail
