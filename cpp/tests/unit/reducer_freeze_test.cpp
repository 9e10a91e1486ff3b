// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>

#include <apex/parallel/reducer.h>
#include <support/reducer_steps.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

// Parameters that are frozen and unfrozen, in the same way on all ranks or not. See
// Note [One plan]. Oracle: the float64 average over ranks. The thread backend fails if
// messages do not match.

namespace apex::parallel {
namespace {

using apex::testing::relative_error;
using apex::testing::run_ranks;
using apex::testing::thrown_by;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kWorld = 3;

at::Tensor batch(int rank, int step) {
  return apex::testing::random_batch(6, 4, 100 * step + rank);
}

/// The parameters (indices) that one rank freezes in one step.
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

  /// Runs the steps, with `by_step[s][r]` frozen on rank r in step s. If ranks differ, every rank
  /// throws and names the first parameter that differs; otherwise each gradient is the average.
  void run(const std::vector<std::vector<Frozen>>& by_step) const {
    run_ranks(kWorld, [&](int rank, const Group& group) {
      ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
      // A parameter that never gets a gradient, so that every backward must check parameters
      // outside the plan.
      auto parameters = model.parameters;
      parameters.push_back({"unused", at::ones({3}).requires_grad_()});
      Reducer reducer(parameters, {group}, options());
      for (size_t step = 0; step < by_step.size(); ++step) {
        const std::vector<Frozen>& ranks = by_step[step];
        const std::string where = "step " + std::to_string(step) + ", rank " + std::to_string(rank);
        model.zero_grad();
        freeze(model, ranks[rank]);
        reducer.prepare_for_forward();
        // So that there is a backward even if all parameters are frozen.
        const at::Tensor y = model.forward(batch(rank, step).requires_grad_());
        reducer.watch_outputs({y});
        const std::string error = thrown_by([&] { y.square().mean().backward(); });
        const std::string apart = difference(ranks);
        if (!apart.empty()) {
          EXPECT_NE(error.find(apart), std::string::npos)
              << where << ": " << apart << ": " << error;
          continue;
        }
        ASSERT_EQ(error, "") << where;
        ToyModel reference = ToyModel::mlp({4, 6, 6, 2}, 1).clone(at::kDouble);
        for (int r = 0; r < kWorld; ++r) {
          freeze(reference, ranks[r]);
          reference.forward(batch(r, step).requires_grad_()).square().mean().backward();
        }
        for (size_t i = 0; i < model.size(); ++i) {
          at::Tensor expected = reference[i].grad();
          if (expected.defined()) expected = expected / kWorld;
          EXPECT_LT(relative_error(model[i].grad(), expected), 1e-5)
              << where << ", " << model.parameters[i].name;
        }
      }
    });
  }

  /// "parameter 'fc0.bias' is frozen on rank 1 and trainable on rank 0, rank 2", or empty.
  static std::string difference(const std::vector<Frozen>& ranks) {
    const ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
    for (size_t i = 0; i < model.size(); ++i) {
      std::string of[2];
      for (size_t r = 0; r < ranks.size(); ++r) {
        const bool trains = std::find(ranks[r].begin(), ranks[r].end(), i) == ranks[r].end();
        std::string& text = of[trains ? 1 : 0];
        text += (text.empty() ? "rank " : ", rank ") + std::to_string(r);
      }
      if (of[0].empty() || of[1].empty()) continue;
      return "parameter '" + model.parameters[i].name + "' is frozen on " + of[0] +
             " and trainable on " + of[1];
    }
    return {};
  }
};

INSTANTIATE_TEST_SUITE_P(Table, ReducerFreeze,
                         ::testing::Combine(::testing::Values(1, 40, 10'000'000),
                                            ::testing::Bool()));

TEST_P(ReducerFreeze, OneRankFreezesAlone_EveryRankThrowsNamingIt_AndAllCanGoOn) {
  const std::vector<Frozen> none(kWorld), all(kWorld, Frozen{0, 1});
  run({none,
       none,
       {{}, {0, 1}, {}},
       none,
       {{}, {0, 1}, {}},
       all,
       all,
       none,
       all,
       {{}, {0, 1}, {}},
       all,
       none});
}

TEST_P(ReducerFreeze, RanksFreezeDifferentParametersAtOnce_EveryRankThrows_AndAllCanGoOn) {
  const std::vector<Frozen> none(kWorld);
  run({none, {{0}, {2, 3}, {5}}, {{0, 1}, {2}, {}}, {{4}, {4}, {4}}, {{4}, {4}, {}}, none});
}

TEST_P(ReducerFreeze, FrozenEverywhereAndUnfrozenOnOneRank_EveryRankThrows_AndAllCanGoOn) {
  const std::vector<Frozen> some(kWorld, Frozen{0, 1, 2}), all(kWorld, Frozen{0, 1, 2, 3, 4, 5});
  run({some,
       some,
       {{0, 1, 2}, {0}, {0, 1, 2}},
       {{0, 1, 2}, {}, {2}},
       some,
       all,
       all,
       {{}, {0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}},
       all,
       some});
}

TEST_P(ReducerFreeze, InTheFirstBackward_EveryRankThrows_AndAllCanGoOn) {
  const std::vector<Frozen> none(kWorld);
  run({{{}, {3}, {}}, {{3}, {3}, {}}, none, none});
}

/// The plan is discarded for another reason while ranks train different parameters.
TEST_P(ReducerFreeze, RebuiltAndFrozenAlike_NextBackwards_AreRight) {
  run_ranks(kWorld, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
    Reducer reducer(model.parameters, {group}, options());
    for (int step = 0; step < 12; ++step) {
      model.zero_grad();
      if (step % 5 == 3) reducer.rebuild_buckets();
      freeze(model, step % 4 < 2 ? Frozen{} : Frozen{0, 1});
      reducer.prepare_for_forward();
      const at::Tensor y = model.forward(batch(rank, step));
      reducer.watch_outputs({y});
      const bool alone = step == 7 && rank == 1;  // in the middle of a periodic pattern
      if (alone) reducer.rebuild_buckets();
      const std::string error = thrown_by([&] { y.square().mean().backward(); });
      EXPECT_EQ(error.find("rank 1 requested a new bucket plan") != std::string::npos, step == 7)
          << error;
      if (step == 7 && rank != 1) reducer.rebuild_buckets();
      if (step == 7) continue;
      ToyModel reference = ToyModel::mlp({4, 6, 6, 2}, 1).clone(at::kDouble);
      for (int r = 0; r < kWorld; ++r) {
        freeze(reference, step % 4 < 2 ? Frozen{} : Frozen{0, 1});
        reference.forward(batch(r, step)).square().mean().backward();
      }
      for (size_t i = 0; i < model.size(); ++i) {
        at::Tensor expected = reference[i].grad();
        if (expected.defined()) expected = expected / kWorld;
        EXPECT_LT(relative_error(model[i].grad(), expected), 1e-5)
            << "step " << step << ", " << model.parameters[i].name;
      }
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
      EXPECT_EQ(reducer.statistics().plans_recorded, step < 2 ? 1 : 2) << step;
    }
  });
}

/// A program that alternates between two models. The first backward has one of them only.
TEST_P(ReducerFreeze, SetsThatAlternate_HaveOnePlan_AndOverlap) {
  const std::vector<Frozen> period{{0, 1, 2, 3}, {4, 5}, {}};
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
    Reducer reducer(model.parameters, {group}, options());
    for (size_t step = 0; step < 5 * period.size(); ++step) {
      const auto before = reducer.statistics();
      model.zero_grad();
      freeze(model, period[step % period.size()]);
      reducer.prepare_for_forward();
      const at::Tensor y = model.forward(batch(rank, static_cast<int>(step)));
      reducer.watch_outputs({y});
      y.square().mean().backward();
      if (step < 3) continue;
      const auto after = reducer.statistics();
      EXPECT_EQ(after.plans_recorded, 2) << step;
      EXPECT_LE(after.launched_at_end - before.launched_at_end, 1) << step;  // with the report
    }
  });
}

/// Hazard: ranks that leave the plan at different times would take part in different exchanges.
TEST_P(ReducerFreeze, ParameterThatStaysFrozen_LeavesThePlan_AndComesBack) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
    Reducer reducer(model.parameters, {group}, options());
    const auto planned = [&] {
      const auto plan = reducer.plan();
      size_t count = 0;
      for (const auto& bucket : plan->buckets) count += bucket.size();
      return count;
    };
    for (int step = 0; step < 280; ++step) {
      model.zero_grad();
      freeze(model, step < 2 || step == 270 ? Frozen{} : Frozen{0});
      reducer.prepare_for_forward();
      const at::Tensor y = model.forward(batch(rank, step));
      reducer.watch_outputs({y});
      y.square().mean().backward();
      EXPECT_EQ(planned(), step < 125 || step > 270 ? 6U : step > 135 ? 5U : planned()) << step;
    }
    EXPECT_EQ(reducer.statistics().plans_recorded, 3);
  });
}

TEST_P(ReducerFreeze, RhythmsThatChange_AlikeOrOnSomeRanks_AreRightOrThrowOnEveryRank) {
  const std::vector<Frozen> sets{{}, {0, 1}, {2, 3, 4}, {5}, {0, 1, 2, 3, 4, 5}, {1, 4}};
  for (uint32_t seed = 0; seed < 4; ++seed) {
    std::mt19937 random(seed);
    std::vector<std::vector<Frozen>> by_step{std::vector<Frozen>(kWorld)};
    while (by_step.size() < 40) {
      // A few periods of a pattern, with occasional deviations.
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
