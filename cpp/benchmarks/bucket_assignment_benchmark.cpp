// SPDX-License-Identifier: BSD-3-Clause
#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include <apex/parallel/bucket_assignment.h>

// Planning runs once per recorded order, so it need only be fast compared to a step.

namespace {

using apex::parallel::assign_buckets;
using apex::parallel::BucketLimits;
using apex::parallel::ParameterInfo;

void AssignBuckets(benchmark::State& state) {
  const int64_t count = state.range(0);
  std::vector<ParameterInfo> parameters;
  std::vector<int64_t> order;
  for (int64_t i = 0; i < count; ++i) {
    ParameterInfo info;
    info.numel = int64_t{64} << (i % 12);
    info.dtype = i % 3 == 0 ? at::kHalf : at::kFloat;
    parameters.push_back(info);
    order.push_back(count - 1 - i);
  }
  BucketLimits limits;
  limits.cap = 1'000'000;
  for (auto _ : state) {
    benchmark::DoNotOptimize(assign_buckets(parameters, order, limits));
  }
  state.SetItemsProcessed(state.iterations() * count);
}
BENCHMARK(AssignBuckets)->Arg(100)->Arg(1000)->Arg(10000);

}  // namespace
