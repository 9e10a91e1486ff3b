// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/plan_agreement.h"

#include <utility>

#include <ATen/Functions.h>

namespace apex::parallel::detail {

PlanExchange::PlanExchange(const Membership& members, const Recording& mine)
    : maximum_(
          members.all_reduce("exchange of used parameters", encode(mine), c10d::ReduceOp::MAX)),
      order_(members.broadcast("broadcast of the bucket order", encode_order(mine))) {}

AgreedRecording PlanExchange::wait() const {
  const at::Tensor maximum = maximum_.wait();
  return decode(maximum, order_.wait());
}

std::vector<BucketPlan> broadcast_plans(const Membership& members,
                                        const std::vector<BucketPlan>& plans, int64_t parameters) {
  // [kMostPlans, 2, parameters]: members of all buckets in order, and where buckets end; -1 behind
  // the last.
  at::Tensor code = at::full({kMostPlans, 2, parameters}, -1, at::kLong);
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
  code = members.broadcast("broadcast of bucket plans", code).wait();
  const auto agreed = code.accessor<int64_t, 3>();
  std::vector<BucketPlan> result;
  for (int64_t p = 0; p < kMostPlans && parameters > 0 && agreed[p][0][0] >= 0; ++p) {
    BucketPlan plan;
    std::vector<int64_t> bucket;
    for (int64_t i = 0; i < parameters && agreed[p][0][i] >= 0; ++i) {
      bucket.push_back(agreed[p][0][i]);
      if (agreed[p][1][i] == 1) plan.buckets.push_back(std::exchange(bucket, {}));
    }
    result.push_back(std::move(plan));
  }
  return result;
}

}  // namespace apex::parallel::detail
