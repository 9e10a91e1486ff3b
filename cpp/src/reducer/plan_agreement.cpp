// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/plan_agreement.h"

#include <utility>
#include <vector>

#include <ATen/Functions.h>

namespace apex::parallel::detail {

Recording exchange_recordings(const Membership& members, const Recording& mine,
                              const std::vector<uint8_t>& used_by_any) {
  const ControlMessage maximum =
      members.all_reduce("exchange of recorded gradients", encode(mine), c10d::ReduceOp::MAX);
  const ControlMessage order =
      members.broadcast("broadcast of the bucket order", encode_order(mine));
  return decode(maximum.wait(), order.wait(), used_by_any);
}

BucketPlan broadcast_plan(const Membership& members, const BucketPlan& plan, int64_t parameters) {
  // [2, parameters]: the members of all buckets in order, and the ends of buckets; padded with -1.
  at::Tensor code = at::full({2, parameters}, -1, at::kLong);
  auto fields = code.accessor<int64_t, 2>();
  int64_t member = 0;
  for (const auto& bucket : plan.buckets) {
    for (const int64_t index : bucket) {
      fields[0][member] = index;
      fields[1][member++] = 0;
    }
    if (!bucket.empty()) fields[1][member - 1] = 1;
  }
  code = members.broadcast("broadcast of the bucket plan", code).wait();
  const auto agreed = code.accessor<int64_t, 2>();
  BucketPlan result;
  std::vector<int64_t> bucket;
  for (int64_t i = 0; i < parameters && agreed[0][i] >= 0; ++i) {
    bucket.push_back(agreed[0][i]);
    if (agreed[1][i] == 1) result.buckets.push_back(std::exchange(bucket, {}));
  }
  return result;
}

}  // namespace apex::parallel::detail
