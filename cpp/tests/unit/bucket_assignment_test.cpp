// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <apex/error.h>
#include <apex/parallel/detail/bucket_assignment.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

namespace apex::parallel {
namespace {

using Buckets = std::vector<std::vector<int64_t>>;

ParameterInfo parameter(int64_t numel, at::ScalarType dtype = at::kFloat,
                        at::Device device = at::Device(at::kCPU)) {
  return {numel, dtype, device};
}

struct Case {
  const char* name;
  std::vector<ParameterInfo> parameters;
  std::vector<int64_t> order;
  BucketLimits limits;
  std::vector<int64_t> closing;
  Buckets expected;
};

class BucketAssignmentTable : public ::testing::TestWithParam<Case> {};

TEST_P(BucketAssignmentTable, Plan_Assigned_MatchesTable) {
  const Case& c = GetParam();
  EXPECT_EQ(assign_buckets(c.parameters, c.order, c.limits, c.closing).buckets, c.expected);
}

constexpr int64_t kMebi = int64_t{1} << 20;
const BucketLimits kTen{10, 0, BucketLimits::Unit::kElements};
const at::Device kGpu0(at::kCUDA, 0);
const at::Device kGpu1(at::kCUDA, 1);

INSTANTIATE_TEST_SUITE_P(
    Table, BucketAssignmentTable,
    ::testing::Values(
        Case{"Nothing", {}, {}, kTen, {}, {}},
        Case{"OneFits", {parameter(3)}, {0}, kTen, {}, {{0}}},
        Case{"ClosesAsSoonAsReached",
             {parameter(6), parameter(6), parameter(6)},
             {0, 1, 2},
             kTen,
             {},
             {{0, 1}, {2}}},
        Case{"FollowsReadyOrder",
             {parameter(5), parameter(5), parameter(5), parameter(5)},
             {3, 1, 2, 0},
             kTen,
             {},
             {{3, 1}, {2, 0}}},
        Case{"LargeTravelsAloneAndSmallStayTogether",
             {parameter(2), parameter(10), parameter(2), parameter(11), parameter(2)},
             {0, 1, 2, 3, 4},
             kTen,
             {},
             {{1}, {3}, {0, 2, 4}}},
        Case{"TypesAreKeptApartOrderedByLastMember",
             {parameter(1), parameter(1, at::kHalf), parameter(1), parameter(1, at::kHalf)},
             {0, 1, 3, 2},
             kTen,
             {},
             {{1, 3}, {0, 2}}},
        Case{"DevicesAreKeptApart",
             {parameter(1, at::kFloat, kGpu0), parameter(1, at::kFloat, kGpu1)},
             {1, 0},
             kTen,
             {},
             {{1}, {0}}},
        Case{"BytesCountElementSize",
             {parameter(2), parameter(2), parameter(4, at::kHalf), parameter(4, at::kHalf)},
             {0, 1, 2, 3},
             {16, 0, BucketLimits::Unit::kBytes},
             {},
             {{0, 1}, {2, 3}}},
        Case{"SmallFirstBucket",
             {parameter(4), parameter(4), parameter(4), parameter(4)},
             {0, 1, 2, 3},
             {10, 4, BucketLimits::Unit::kElements},
             {},
             {{0}, {1, 2, 3}}},
        Case{"DefaultOnTheCpuIsEightMebibytesBehindOne",
             {parameter(kMebi / 8), parameter(kMebi / 8), parameter(kMebi), parameter(2 * kMebi),
              parameter(kMebi), parameter(1)},
             {0, 1, 2, 3, 4, 5},
             {},
             {},
             {{0, 1}, {3}, {2, 4}, {5}}},  // 1 MiB, 8 MiB alone, 8 MiB together, the rest
        Case{"DefaultOneBucketIsEnoughIsOneBucket",
             {parameter(kMebi), parameter(kMebi / 2), parameter(4)},
             {0, 1, 2},
             {},
             {},
             {{0, 1, 2}}},
        Case{"DefaultElsewhereCountsElements",
             {parameter(4'000'000, at::kHalf, kGpu0), parameter(4'000'000, at::kHalf, kGpu0),
              parameter(4'000'000, at::kHalf, kGpu0), parameter(10'000'000, at::kHalf, kGpu0)},
             {0, 1, 2, 3},
             {},
             {},
             {{0}, {1, 2}, {3}}},
        Case{"TriggersCloseEveryOpenBucketAndIgnoreSizes",
             {parameter(100), parameter(1, at::kHalf), parameter(1), parameter(100)},
             {0, 1, 2, 3},
             kTen,
             {2},
             {{1}, {0, 2}, {3}}},
        Case{"ZeroElements", {parameter(0), parameter(0)}, {0, 1}, kTen, {}, {{0, 1}}},
        Case{"UnlistedAreLeftOut", {parameter(1), parameter(1)}, {1}, kTen, {}, {{1}}}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(BucketAssignment, RandomInput_Assigned_IsAnOrderedPartitionWithinLimits) {
  std::mt19937 random(20261120);
  for (int round = 0; round < 200; ++round) {
    const int64_t count = random() % 40;
    std::vector<ParameterInfo> parameters;
    for (int64_t i = 0; i < count; ++i) {
      parameters.push_back(parameter(random() % 30, random() % 2 ? at::kFloat : at::kDouble));
    }
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    const BucketLimits limits{1 + static_cast<int64_t>(random() % 40), 0,
                              BucketLimits::Unit::kElements};
    const BucketPlan plan = assign_buckets(parameters, order, limits);

    std::vector<int64_t> position(count);
    for (int64_t i = 0; i < count; ++i) position[order[i]] = i;
    std::vector<int64_t> seen;
    int64_t last_ready = -1;
    for (const auto& bucket : plan.buckets) {
      ASSERT_FALSE(bucket.empty());
      int64_t size = 0;
      int64_t ready = -1;
      for (const int64_t index : bucket) {
        EXPECT_EQ(parameters[index].dtype, parameters[bucket.front()].dtype);
        EXPECT_GT(position[index], ready) << "members out of ready order";
        ready = position[index];
        seen.push_back(index);
        size += parameters[index].numel;
      }
      EXPECT_LT(size - parameters[bucket.back()].numel, limits.cap) << "closed too late";
      EXPECT_GT(ready, last_ready) << "buckets out of the order in which they can be launched";
      last_ready = ready;
    }
    std::sort(seen.begin(), seen.end());
    std::sort(order.begin(), order.end());
    EXPECT_EQ(seen, order);
  }
}

TEST(BucketAssignment, BadInput_Assigned_ThrowsInvalidArgument) {
  const std::vector<ParameterInfo> two{parameter(1), parameter(1)};
  EXPECT_THROW(assign_buckets(two, {0, 1}, {0, 1, BucketLimits::Unit::kElements}), InvalidArgument);
  EXPECT_THROW(assign_buckets(two, {0, 1}, {-5, 0, BucketLimits::Unit::kElements}),
               InvalidArgument);
  EXPECT_THROW(assign_buckets(two, {0, 2}, kTen), InvalidArgument);
  EXPECT_THROW(assign_buckets(two, {0, -1}, kTen), InvalidArgument);
  EXPECT_THROW(assign_buckets(two, {0, 0}, kTen), InvalidArgument);
  EXPECT_THROW(assign_buckets(two, {0}, kTen, {7}), InvalidArgument);
}

}  // namespace
}  // namespace apex::parallel
