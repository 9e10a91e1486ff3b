#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include <ATen/ATen.h>

#include <apex/error.h>
#include <apex/parallel/bucket_assignment.h>
#include <apex/parallel/reducer.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

namespace apex::parallel {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

struct Problem {
  std::vector<ParameterInfo> parameters;
  std::vector<int64_t> order;
  std::vector<double> ready_s;
  ReduceCost cost;
};

Problem random_problem(std::mt19937& random, int count, bool several_types) {
  Problem problem;
  std::uniform_int_distribution<int64_t> size(1, 1000);
  std::uniform_real_distribution<double> unit(0, 1);
  double clock = 0;
  for (int i = 0; i < count; ++i) {
    ParameterInfo info;
    info.numel = size(random);
    if (several_types && unit(random) < 0.4) info.dtype = at::kHalf;
    problem.parameters.push_back(info);
    problem.order.push_back(i);
    clock += unit(random) * 1e-3;
    problem.ready_s.push_back(clock);
  }
  problem.cost = {unit(random) * 3e-3, unit(random) * 1e-6, unit(random) * 1e-7};
  return problem;
}

/// When the last of these runs is reduced; `cuts` has bit i set if a run ends behind position i.
double end_of(const Problem& problem, uint32_t cuts) {
  double end = 0;
  size_t begin = 0;
  for (size_t i = 0; i < problem.order.size(); ++i) {
    if (i + 1 != problem.order.size() && (cuts >> i & 1) == 0) continue;
    double bytes = 0;
    std::set<at::ScalarType> types;
    for (size_t k = begin; k <= i; ++k) {
      const ParameterInfo& info = problem.parameters[problem.order[k]];
      bytes += static_cast<double>(info.numel * static_cast<int64_t>(c10::elementSize(info.dtype)));
      types.insert(info.dtype);
    }
    const double copy = i > begin ? bytes * problem.cost.copy_seconds_per_byte : 0;
    end = std::max(end, problem.ready_s[i] + copy) +
          static_cast<double>(types.size()) * problem.cost.latency_s +
          bytes * problem.cost.seconds_per_byte;
    begin = i + 1;
  }
  return end;
}

TEST(BucketsByTime, RandomProblems_End_IsTheEarliestOfAllPartitions) {
  const unsigned seed = std::random_device{}();
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    const int count = 1 + round % 11;
    const Problem problem = random_problem(random, count, round % 2 == 1);
    double best = std::numeric_limits<double>::infinity();
    for (uint32_t cuts = 0; cuts < (1u << (count - 1)); ++cuts) {
      best = std::min(best, end_of(problem, cuts));
    }
    const TimedPlan timed = assign_buckets_by_time(problem.parameters, problem.order,
                                                   problem.ready_s, problem.cost);
    EXPECT_NEAR(timed.end_s, best, 1e-12) << "seed " << seed << ", round " << round;
    std::vector<int64_t> members;
    for (const auto& bucket : timed.plan.buckets) {
      for (const int64_t index : bucket) {
        members.push_back(index);
        EXPECT_EQ(problem.parameters[index].dtype, problem.parameters[bucket.front()].dtype);
      }
    }
    std::sort(members.begin(), members.end());
    EXPECT_EQ(members, problem.order);
  }
}

TEST(BucketsByTime, LatencyAlone_IsOneBucket_AndBandwidthAloneIsManyBuckets) {
  Problem problem;
  for (int i = 0; i < 20; ++i) {
    problem.parameters.push_back({1000});
    problem.order.push_back(i);
    problem.ready_s.push_back(1e-3 * i);
  }
  const auto buckets = [&](const ReduceCost& cost) {
    return assign_buckets_by_time(problem.parameters, problem.order, problem.ready_s, cost)
        .plan.buckets.size();
  };
  EXPECT_EQ(buckets({1.0, 0, 0}), 1u);
  EXPECT_EQ(buckets({0, 1e-7, 0}), 20u);  // each is through before the next is ready
}

TEST(BucketsByTime, BadArguments_ThrowInvalidArgument) {
  EXPECT_THROW(assign_buckets_by_time({{5}}, {0}, {}, {}), InvalidArgument);
  EXPECT_THROW(assign_buckets_by_time({{5}}, {1}, {0}, {}), InvalidArgument);
  EXPECT_THROW(assign_buckets_by_time({{5}}, {0}, {0}, {-1, 0, 0}), InvalidArgument);
  EXPECT_TRUE(assign_buckets_by_time({}, {}, {}, {}).plan.buckets.empty());
}

TEST(ReducerAutoBuckets, SlowRank_Tuning_RanksAgreeAndGradientsStayRight) {
  apex::testing::run_ranks(3, [](int rank, const Group& group) {
    apex::testing::ToyModel model = apex::testing::ToyModel::mlp({4, 30, 20, 10, 2}, 1);
    ReducerOptions options;
    options.auto_buckets = true;
    Reducer reducer(model.parameters, {group}, options);
    constexpr int kSteps = 50;  // to learn, observe, and try at most eight plans takes 49
    for (int step = 0; step < kSteps; ++step) {
      model.zero_grad();
      reducer.prepare_for_forward();
      const at::Tensor y = model.forward(apex::testing::random_batch(4, 4, 10 * step + rank));
      reducer.watch_outputs({y});
      y.square().mean().backward();
      for (size_t i = 0; i < model.size(); ++i) {
        at::Tensor expected;
        for (int r = 0; r < 3; ++r) {
          apex::testing::ToyModel other = model.clone(at::kDouble);
          other.forward(apex::testing::random_batch(4, 4, 10 * step + r)).square().mean().backward();
          const at::Tensor part = other[i].grad() / 3;
          expected = expected.defined() ? expected + part : part;
        }
        EXPECT_LT(apex::testing::relative_error(model[i].grad(), expected), 1e-5);
      }
    }
    EXPECT_EQ(reducer.statistics().plans_tuned, 1);
    EXPECT_EQ(reducer.statistics().backwards, kSteps);
  });
}

}  // namespace
}  // namespace apex::parallel
