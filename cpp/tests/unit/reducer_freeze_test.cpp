// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>

#include <apex/parallel/reducer.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

// Parameters that are frozen and unfrozen on some ranks only. See
// Note [Parameters that are frozen or unfrozen].

namespace apex::parallel {
namespace {

using apex::testing::relative_error;
using apex::testing::run_ranks;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kWorld = 3;

at::Tensor batch(int rank, int step) {
  return apex::testing::random_batch(6, 4, 100 * step + rank);
}

/// What one rank freezes in one step: indices of parameters.
using Frozen = std::vector<size_t>;

void freeze(ToyModel& model, const Frozen& frozen) {
  for (size_t i = 0; i < model.size(); ++i) model[i].requires_grad_(true);
  for (const size_t i : frozen) model[i].requires_grad_(false);
}

/// Bucket size in elements; whether gradients are views.
class ReducerFreeze : public ::testing::TestWithParam<std::tuple<int64_t, bool>> {
 protected:
  ReducerOptions options() const {
    ReducerOptions options;
    options.limits.cap = std::get<0>(GetParam());
    options.gradient_as_bucket_view = std::get<1>(GetParam());
    return options;
  }

  /// Runs the steps, `by_step[s][r]` frozen on rank r in step s, and compares each gradient with
  /// the average over ranks in float64, with zeros where a rank has frozen the parameter.
  void run(const std::vector<std::vector<Frozen>>& by_step) const {
    run_ranks(kWorld, [&](int rank, const Group& group) {
      ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
      for (const size_t i : by_step.front()[rank]) model[i].requires_grad_(false);
      // One that never gets a gradient, so that every backward asks after parameters outside the
      // plan.
      auto parameters = model.parameters;
      parameters.push_back({"unused", at::ones({3}).requires_grad_()});
      Reducer reducer(parameters, {group}, options());
      for (size_t step = 0; step < by_step.size(); ++step) {
        model.zero_grad();
        freeze(model, by_step[step][rank]);
        reducer.prepare_for_forward();
        // So that there is a backward where all parameters are frozen.
        const at::Tensor y = model.forward(batch(rank, step).requires_grad_());
        reducer.watch_outputs({y});
        y.square().mean().backward();
        ToyModel reference = ToyModel::mlp({4, 6, 6, 2}, 1).clone(at::kDouble);
        for (int r = 0; r < kWorld; ++r) {
          freeze(reference, by_step[step][r]);
          reference.forward(batch(r, step).requires_grad_()).square().mean().backward();
        }
        for (size_t i = 0; i < model.size(); ++i) {
          at::Tensor expected = reference[i].grad();
          if (expected.defined()) expected = expected / kWorld;
          EXPECT_LT(relative_error(model[i].grad(), expected), 1e-5)
              << "step " << step << ", rank " << rank << ", " << model.parameters[i].name;
        }
      }
      // Whatever changed, ranks agree on the plan.
      const auto plan = reducer.plan();
      ASSERT_TRUE(plan.has_value());
      std::vector<int64_t> sizes;
      for (const auto& bucket : plan->buckets) sizes.push_back(static_cast<int64_t>(bucket.size()));
      sizes.resize(model.size());
      std::vector<at::Tensor> mine{at::tensor(sizes)};
      std::vector<std::vector<at::Tensor>> all(1);
      for (int r = 0; r < kWorld; ++r) all[0].push_back(at::empty_like(mine[0]));
      group->allgather(all, mine)->wait();
      for (int r = 0; r < kWorld; ++r) EXPECT_TRUE(all[0][r].equal(mine[0])) << "rank " << r;
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Table, ReducerFreeze,
                         ::testing::Combine(::testing::Values(1, 40, 10'000'000),
                                            ::testing::Bool()));

TEST_P(ReducerFreeze, OneRankFreezesAndUnfreezes_Gradients_AreTheAverageWithZeros) {
  const std::vector<Frozen> none(kWorld);
  run({none, none, {{}, {0, 1}, {}}, {{}, {0, 1}, {}}, none, none});
}

TEST_P(ReducerFreeze, RanksFreezeDifferentParametersAtOnce_Gradients_AreTheAverageWithZeros) {
  const std::vector<Frozen> none(kWorld);
  run({none, {{0}, {2, 3}, {5}}, {{0, 1}, {2}, {}}, {{4}, {4}, {4}}, {{4}, {4}, {}}, none});
}

TEST_P(ReducerFreeze, FrozenEverywhereAndUnfrozenOnOneRank_Gradient_IsReducedInThatStep) {
  const std::vector<Frozen> all(kWorld, Frozen{0, 1, 2});
  run({all, all, {{0, 1, 2}, {0}, {0, 1, 2}}, {{0, 1, 2}, {}, {2}}, all, all});
}

TEST_P(ReducerFreeze, EveryRankFreezesAlike_LaterBackwards_OverlapWithOneMorePlan) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
    Reducer reducer(model.parameters, {group}, options());
    for (int step = 0; step < 5; ++step) {
      const auto before = reducer.statistics();
      model.zero_grad();
      freeze(model, step < 2 ? Frozen{} : Frozen{0, 1});
      reducer.prepare_for_forward();
      const at::Tensor y = model.forward(batch(rank, step));
      reducer.watch_outputs({y});
      y.square().mean().backward();
      const auto after = reducer.statistics();
      EXPECT_EQ(after.plans_learnt, step < 2 ? 1 : 2) << step;
      const bool steady = step == 1 || step > 2;
      EXPECT_EQ(after.launched_at_end - before.launched_at_end == 0, steady) << step;
    }
  });
}

TEST(ReducerFreezeKind, ParametersOfAnotherDtype_NextBackward_IsRightByANewPlan) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    Reducer reducer(model.parameters, {group});
    for (int step = 0; step < 4; ++step) {
      model.zero_grad();
      if (step == 2) {
        const at::NoGradGuard guard;
        for (size_t i = 0; i < model.size(); ++i) model[i].set_data(model[i].to(at::kDouble));
      }
      ToyModel reference = model.clone(at::kDouble);
      for (int r = 0; r < 2; ++r) {
        reference.forward(batch(r, step).to(at::kDouble)).square().mean().backward();
      }
      reducer.prepare_for_forward();
      const at::Tensor y = model.forward(batch(rank, step).to(model[0].scalar_type()));
      reducer.watch_outputs({y});
      y.square().mean().backward();
      for (size_t i = 0; i < model.size(); ++i) {
        EXPECT_EQ(model[i].grad().scalar_type(), step < 2 ? at::kFloat : at::kDouble);
        EXPECT_LT(relative_error(model[i].grad(), reference[i].grad() / 2), step < 2 ? 1e-5 : 1e-12)
            << step << ", " << model.parameters[i].name;
      }
      EXPECT_EQ(reducer.statistics().plans_learnt, step < 2 ? 1 : 2) << step;
    }
  });
}

/// A program that trains two models in turn. See Note [Sets that come again].
TEST_P(ReducerFreeze, SetsThatComeAgain_AfterOnePeriod_HaveTheirPlansAndOverlap) {
  const std::vector<Frozen> period{{}, {}, {0, 1, 2, 3}, {0, 1, 2, 3, 4, 5}};
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
    Reducer reducer(model.parameters, {group}, options());
    int64_t learnt = 0;
    for (size_t step = 0; step < 6 * period.size(); ++step) {
      const auto before = reducer.statistics();
      const Frozen& frozen = period[step % period.size()];
      model.zero_grad();
      freeze(model, frozen);
      reducer.prepare_for_forward();
      const at::Tensor x = batch(rank, static_cast<int>(step)).requires_grad_();
      const at::Tensor y = model.forward(x);
      reducer.watch_outputs({y});
      y.square().mean().backward();
      const auto after = reducer.statistics();
      if (step == 2 * period.size()) learnt = after.plans_learnt;
      if (step <= 2 * period.size()) continue;
      EXPECT_EQ(after.plans_learnt, learnt) << step;
      // With everything frozen there is only what tells of the step.
      const bool alone = frozen.size() == model.size();
      EXPECT_EQ(after.launched_at_end - before.launched_at_end, alone ? 1 : 0) << step;
      EXPECT_EQ(after.gradients_copied - before.gradients_copied + after.reduced_in_place -
                    before.reduced_in_place,
                static_cast<int64_t>(model.size() - frozen.size()))
          << step;
    }
    EXPECT_EQ(learnt, 4);  // for each set, and when the first one came again
  });
}

TEST_P(ReducerFreeze, RhythmsThatChange_AlikeOrOnSomeRanks_Gradients_AreTheAverageWithZeros) {
  const std::vector<Frozen> sets{{}, {0, 1}, {2, 3, 4}, {5}, {0, 1, 2, 3, 4, 5}, {1, 4}};
  for (uint32_t seed = 0; seed < 4; ++seed) {
    std::mt19937 random(seed);
    std::vector<std::vector<Frozen>> by_step{std::vector<Frozen>(kWorld)};
    while (by_step.size() < 40) {
      // A few periods of one rhythm, in which ranks now and then do something else.
      std::vector<size_t> period(1 + random() % 4);
      for (size_t& set : period) set = random() % sets.size();
      for (size_t step = 0; step < 3 * period.size(); ++step) {
        std::vector<Frozen> ranks(kWorld, sets[period[step % period.size()]]);
        if (random() % 8 == 0) ranks[random() % kWorld] = sets[random() % sets.size()];
        by_step.push_back(std::move(ranks));
      }
    }
    run(by_step);
  }
}

}  // namespace
}  // namespace apex::parallel
