// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <apex/parallel/reducer.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

namespace apex::parallel {
namespace {

using apex::testing::RankError;
using apex::testing::relative_error;
using apex::testing::rows_of_rank;
using apex::testing::run_ranks;
using apex::testing::ThreadBackendControl;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

ReducerOptions small_buckets(int64_t cap = 40) {
  ReducerOptions options;
  options.limits.cap = cap;
  return options;
}

at::Tensor loss_of(const at::Tensor& y) {
  return at::isComplexType(y.scalar_type()) ? at::real(y * y.conj()).mean() : y.square().mean();
}

struct Mode {
  const char* name;
  int world;
  at::ScalarType dtype;
  int64_t cap;
  bool views;
  bool delay;
  bool average;
  double predivide;
  double tolerance;
};

class ReducerModes : public ::testing::TestWithParam<Mode> {};

// Three steps of SGD against one process with the whole batch in float64.
TEST_P(ReducerModes, Gradients_SeveralSteps_EqualConcatenatedBatchInFloat64) {
  const Mode mode = GetParam();
  const bool complex = at::isComplexType(mode.dtype);
  run_ranks(mode.world, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({5, 7, 6, 3}, 7 + rank, mode.dtype);
    ReducerOptions options;
    options.limits.cap = mode.cap;
    options.gradient_as_bucket_view = mode.views;
    options.delay_allreduce = mode.delay;
    options.gradient_average = mode.average;
    options.gradient_predivide_factor = mode.predivide;
    Reducer reducer(model.parameters, {group}, options);
    ToyModel reference = ToyModel::mlp({5, 7, 6, 3}, 7, mode.dtype)
                             .clone(complex ? at::kComplexDouble : at::kDouble);
    for (size_t i = 0; i < model.size(); ++i) {
      ASSERT_EQ(relative_error(model[i], reference[i]), 0) << "rank 0's parameters were not taken";
    }
    const double factor =
        mode.average ? 1.0 : mode.world / mode.predivide;  // a sum over ranks of means
    for (int step = 0; step < 4; ++step) {
      const at::Tensor batch = apex::testing::random_batch(12, 5, 100 + step);
      reducer.prepare_for_forward();
      const at::Tensor y = model.forward(rows_of_rank(batch, rank, mode.world));
      reducer.watch_outputs({y});
      loss_of(y).backward();
      loss_of(reference.forward(batch)).backward();
      for (size_t i = 0; i < model.size(); ++i) {
        EXPECT_LT(relative_error(model[i].grad(), reference[i].grad() * factor), mode.tolerance)
            << mode.name << ", rank " << rank << ", step " << step << ", "
            << model.parameters[i].name;
      }
      model.sgd_step(0.05 / factor);
      reference.sgd_step(0.05);
      // Both ways of clearing gradients.
      if (step % 2 == 0) {
        model.zero_grad();
      } else {
        for (auto& parameter : model.parameters) parameter.tensor.mutable_grad().zero_();
      }
      reference.zero_grad();
    }
    EXPECT_EQ(reducer.statistics().backwards, 4);
    EXPECT_EQ(reducer.statistics().plans_recorded, 1);
    if (!mode.delay) {
      // With a single bucket, that bucket carries the report.
      EXPECT_EQ(reducer.statistics().launched_in_backward > 0, reducer.plan()->buckets.size() > 1)
          << "nothing overlapped";
    } else {
      EXPECT_EQ(reducer.statistics().launched_in_backward, 0);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Table, ReducerModes,
    ::testing::Values(Mode{"OneRank", 1, at::kFloat, 40, false, false, true, 1, 1e-5},
                      Mode{"TwoRanks", 2, at::kFloat, 40, false, false, true, 1, 1e-5},
                      Mode{"ThreeRanks", 3, at::kFloat, 40, false, false, true, 1, 1e-5},
                      Mode{"FourRanks", 4, at::kFloat, 10, false, false, true, 1, 1e-5},
                      Mode{"OneBucket", 2, at::kFloat, 10'000'000, false, false, true, 1, 1e-5},
                      Mode{"EveryParameterAlone", 2, at::kFloat, 1, false, false, true, 1, 1e-5},
                      Mode{"Views", 2, at::kFloat, 40, true, false, true, 1, 1e-5},
                      Mode{"ViewsThreeRanks", 3, at::kFloat, 15, true, false, true, 1, 1e-5},
                      Mode{"Delayed", 2, at::kFloat, 40, false, true, true, 1, 1e-5},
                      Mode{"DelayedViews", 2, at::kFloat, 40, true, true, true, 1, 1e-5},
                      Mode{"Double", 2, at::kDouble, 40, false, false, true, 1, 1e-12},
                      Mode{"Half", 2, at::kHalf, 40, false, false, true, 1, 3e-2},
                      Mode{"BFloat16Views", 2, at::kBFloat16, 40, true, false, true, 1, 2e-1},
                      Mode{"Complex", 2, at::kComplexFloat, 40, false, false, true, 1, 1e-5},
                      Mode{"ComplexDoubleViews", 2, at::kComplexDouble, 40, true, false, true, 1,
                           1e-12},
                      Mode{"Sum", 2, at::kFloat, 40, false, false, false, 1, 1e-5},
                      Mode{"SumPredivided", 2, at::kFloat, 40, false, false, false, 4, 1e-5},
                      Mode{"Predivided", 2, at::kFloat, 40, true, false, true, 8, 1e-5}),
    [](const auto& info) { return std::string(info.param.name); });

// A step on one rank's slice with cleared gradients, as in a training loop.
void train_step(Reducer& reducer, ToyModel& model, const at::Tensor& x) {
  model.zero_grad();
  reducer.prepare_for_forward();
  const at::Tensor y = model.forward(x);
  reducer.watch_outputs({y});
  loss_of(y).backward();
}

TEST(Reducer, RanksThatFinishInDifferentOrder_Backward_LaunchInTheSameOrder) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [](int rank, const Group& group) {
    // Two branches; from the second step on, the order in backward depends on the rank.
    ToyModel a = ToyModel::mlp({4, 6, 2}, 1);
    ToyModel b = ToyModel::mlp({4, 6, 2}, 2);
    std::vector<NamedTensor> all = a.parameters;
    for (const auto& parameter : b.parameters)
      all.push_back({"b." + parameter.name, parameter.tensor});
    Reducer reducer(all, {group}, small_buckets(12));
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = apex::testing::random_batch(4, 4, step);
      at::Tensor y;
      if (step > 0 && rank == 1) {
        const at::Tensor yb = b.forward(x);
        y = a.forward(x) + yb;
      } else {
        const at::Tensor ya = a.forward(x);
        y = b.forward(x) + ya;
      }
      reducer.watch_outputs({y});
      loss_of(y).backward();
    }
  });
  // The backend fails if collectives differ between ranks; compare the logs as well.
  const auto first = control->log(0);
  const auto second = control->log(1);
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) EXPECT_EQ(first[i].numel, second[i].numel);
}

TEST(Reducer, Bucket_Full_IsLaunchedWhileBackwardStillRuns) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 8, 8, 2}, 1);
    Reducer reducer(model.parameters, {group}, small_buckets(1));
    train_step(reducer, model, apex::testing::random_batch(4, 4, rank));
    size_t issued_when_first_layer_fired = 0;
    const size_t before = control->issued(rank);
    // The first layer's gradient comes last.
    model[0].register_hook(
        [&](const at::Tensor&) { issued_when_first_layer_fired = control->issued(rank) - before; });
    train_step(reducer, model, apex::testing::random_batch(4, 4, 2 + rank));
    EXPECT_GE(issued_when_first_layer_fired, 4u);
  });
}

TEST(Reducer, DelayAllreduce_Backward_LaunchesOneBucketAtTheEnd) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 8, 8, 2}, 1);
    ReducerOptions options = small_buckets(1);
    options.delay_allreduce = true;
    Reducer reducer(model.parameters, {group}, options);
    train_step(reducer, model, apex::testing::random_batch(4, 4, rank));
    const size_t before = control->issued(rank);
    const size_t reduced = control->issued(rank, "allreduce");
    train_step(reducer, model, apex::testing::random_batch(4, 4, 2 + rank));
    EXPECT_EQ(control->issued(rank, "allreduce") - reduced, 1u);
    EXPECT_EQ(control->issued(rank) - before, 1u);  // it carries the report
  });
}

TEST(Reducer, OneRank_Backward_SendsNothing) {
  using Change = std::function<void(ReducerOptions&)>;
  const std::vector<Change> changes{
      [](ReducerOptions&) {},
      [](ReducerOptions& options) { options.gradient_as_bucket_view = true; },
      [](ReducerOptions& options) { options.gradient_average = false; },
      [](ReducerOptions& options) { options.gradient_predivide_factor = 4; },
      [](ReducerOptions& options) { options.allreduce_always_fp32 = true; },
      [](ReducerOptions& options) { options.delay_allreduce = true; },
      [](ReducerOptions& options) { options.check_steps = true; },
  };
  for (const Change& change : changes) {
    const auto control = ThreadBackendControl::create(1);
    run_ranks(control, [&](int, const Group& group) {
      ToyModel model = ToyModel::mlp({4, 8, 8, 2}, 1);
      ToyModel alone = ToyModel::mlp({4, 8, 8, 2}, 1);
      ReducerOptions options = small_buckets(40);
      change(options);
      Reducer reducer(model.parameters, {group}, options);
      const size_t before = control->issued(0);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = apex::testing::random_batch(4, 4, step);
        train_step(reducer, model, x);
        alone.zero_grad();
        loss_of(alone.forward(x)).backward();
        for (size_t i = 0; i < model.size(); ++i) {
          EXPECT_LT(relative_error(model[i].grad(), alone[i].grad()), 1e-6);
        }
      }
      EXPECT_EQ(control->issued(0) - before, 0u);
    });
  }
}

TEST(Reducer, OneRankLateAndSparseParametersAndJoin_Backward_SendsNothing) {
  const auto control = ThreadBackendControl::create(1);
  run_ranks(control, [&](int, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 2}, 1);
    const at::Tensor late = at::ones({3}).requires_grad_();
    const at::Tensor table = at::randn({8, 4}).requires_grad_();
    std::vector<NamedTensor> all = model.parameters;
    all.push_back({"late", late});
    all.push_back({"table", table});
    Reducer reducer(all, {group}, small_buckets(4));
    const size_t before = control->issued(0);
    const at::Tensor rows = at::tensor({1, 5, 1}, at::kLong);
    for (const bool uses_late : {false, true, true}) {
      for (const NamedTensor& parameter : all) parameter.tensor.mutable_grad() = at::Tensor();
      reducer.prepare_for_forward();
      at::Tensor loss = loss_of(model.forward(apex::testing::random_batch(4, 4, 0)));
      loss = loss + at::embedding(table, rows, -1, false, /*sparse=*/true).sum();
      if (uses_late) loss = loss + 2 * late.sum();
      reducer.watch_outputs({loss});
      loss.backward();
      ASSERT_EQ(late.grad().defined(), uses_late);
      if (uses_late) {
        EXPECT_TRUE(late.grad().equal(at::full({3}, 2.0f)));
      }
      EXPECT_EQ(table.grad().to_dense()[1][0].item<float>(), 2);
    }
    reducer.begin_join();
    reducer.end_join({table});
    EXPECT_EQ(control->issued(0) - before, 0u);
  });
}

TEST(Reducer, ViewsKeptBetweenSteps_Backward_CopiesNothing) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 8, 8, 2}, 1);
    ReducerOptions options = small_buckets();
    options.gradient_as_bucket_view = true;
    Reducer reducer(model.parameters, {group}, options);
    train_step(reducer, model, apex::testing::random_batch(4, 4, rank));
    const int64_t before = reducer.statistics().gradients_copied;
    for (auto& parameter : model.parameters) parameter.tensor.mutable_grad().zero_();
    const at::Tensor y = model.forward(apex::testing::random_batch(4, 4, rank));
    reducer.watch_outputs({y});
    loss_of(y).backward();
    EXPECT_EQ(reducer.statistics().gradients_copied, before);
    // The gradients are the tensors of buffers().
    std::set<const void*> storages;
    for (const auto& buffer : reducer.buffers()) storages.insert(buffer.storage().data());
    for (auto& parameter : model.parameters) {
      EXPECT_TRUE(storages.count(parameter.tensor.grad().storage().data())) << parameter.name;
    }
  });
}

// --- parameters that some or no ranks use ---

struct UsageCase {
  const char* name;
  bool views;
  int64_t cap;  // 1: one bucket per parameter
};

class ReducerUsage : public ::testing::TestWithParam<UsageCase> {};

// Two branches; each rank chooses per step. Reference: every rank's loss in float64.
TEST_P(ReducerUsage, BranchesChosenPerRankAndStep_Backward_AverageWithZerosAndNoneStaysNone) {
  const UsageCase usage = GetParam();
  // choice[step][rank]: bit 0 branch a, bit 1 branch b
  const int choice[][2] = {{1, 1}, {3, 3}, {1, 2}, {2, 2}, {3, 1}, {1, 1}, {2, 1}, {0, 2}, {0, 0}};
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel a = ToyModel::mlp({4, 6, 2}, 1);
    ToyModel b = ToyModel::mlp({4, 6, 2}, 2);
    std::vector<NamedTensor> all = a.parameters;
    for (const auto& parameter : b.parameters)
      all.push_back({"b." + parameter.name, parameter.tensor});
    ToyModel a64 = a.clone(at::kDouble);
    ToyModel b64 = b.clone(at::kDouble);
    ReducerOptions options = small_buckets(usage.cap);
    options.gradient_as_bucket_view = usage.views;
    Reducer reducer(all, {group}, options);
    for (size_t step = 0; step < std::size(choice); ++step) {
      auto loss = [&](const ToyModel& x, const ToyModel& y, int who) {
        const at::Tensor input = apex::testing::random_batch(4, 4, 10 * step + who);
        // An output that requires grad even if no branch is taken.
        at::Tensor out = at::zeros({4, 2}, at::kDouble).requires_grad_();
        if (choice[step][who] & 1) out = out + x.forward(input);
        if (choice[step][who] & 2) out = out + y.forward(input);
        return (out * 1.0);
      };
      a.zero_grad();
      b.zero_grad();
      a64.zero_grad();
      b64.zero_grad();
      reducer.prepare_for_forward();
      const at::Tensor y = loss(a, b, rank);
      reducer.watch_outputs({y});
      loss_of(y).backward();
      for (int who = 0; who < 2; ++who) (loss_of(loss(a64, b64, who)) / 2).backward();
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_LT(relative_error(a[i].grad(), a64[i].grad()), 1e-5)
            << usage.name << " a, rank " << rank << " step " << step << ' ' << a.parameters[i].name;
        EXPECT_LT(relative_error(b[i].grad(), b64[i].grad()), 1e-5)
            << usage.name << " b, rank " << rank << " step " << step << ' ' << b.parameters[i].name;
      }
    }
    EXPECT_EQ(reducer.statistics().plans_recorded, 2) << "branch b appeared in the second step";
  });
}

INSTANTIATE_TEST_SUITE_P(
    Table, ReducerUsage,
    ::testing::Values(UsageCase{"Copied", false, 20}, UsageCase{"Views", true, 20},
                      UsageCase{"Alone", false, 1}, UsageCase{"AloneViews", true, 1},
                      UsageCase{"OneBucket", false, 1000}, UsageCase{"OneBucketViews", true, 1000}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Reducer, EveryRankUsesEverything_Backward_ReadsNoUsageAndSendsNothingExtra) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    Reducer reducer(model.parameters, {group}, small_buckets(1000));
    train_step(reducer, model, apex::testing::random_batch(4, 4, rank));
    const size_t before = control->issued(rank);
    train_step(reducer, model, apex::testing::random_batch(4, 4, rank));
    EXPECT_EQ(control->issued(rank) - before, 1u);
    EXPECT_EQ(reducer.statistics().usage_reads, 0);
  });
}

TEST(Reducer, ZeroGradientEverywhere_Backward_IsNotTakenForUnused) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({256, 128, 1}, 1);  // the first weight is reduced in place
    Reducer reducer(model.parameters, {group}, small_buckets(256 * 128));
    train_step(reducer, model, apex::testing::random_batch(4, 256, rank));
    model.zero_grad();
    // Rank 0 computes exact zeros, rank 1 computes nothing.
    const at::Tensor x = apex::testing::random_batch(4, 256, rank);
    at::Tensor y = rank == 0 ? model.forward(x) * 0.0 : at::zeros({4, 1}).requires_grad_() * 1.0;
    reducer.watch_outputs({y});
    loss_of(y).backward();
    for (auto& parameter : model.parameters) {
      ASSERT_TRUE(parameter.tensor.grad().defined()) << parameter.name << " on rank " << rank;
      EXPECT_EQ(parameter.tensor.grad().abs().max().item<float>(), 0);
    }
  });
}

TEST(Reducer, StaticGraph_LateParameter_ThrowsNamingIt) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel a = ToyModel::mlp({4, 2}, 1);
    ToyModel b = ToyModel::mlp({4, 2}, 2);
    std::vector<NamedTensor> all = a.parameters;
    all.push_back({"late.weight", b[0]});
    ReducerOptions options;
    options.static_graph = true;
    Reducer reducer(all, {group}, options);
    const at::Tensor x = apex::testing::random_batch(4, 4, rank);
    loss_of(a.forward(x)).backward();
    try {
      (loss_of(a.forward(x)) + b[0].sum()).backward();
      FAIL() << "rank " << rank << " should have thrown";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("late.weight"), std::string::npos) << error.what();
    }
  });
}

// --- accumulation and several backwards ---

TEST(Reducer, NotSynchronizing_Backward_AccumulatesLocallyAndNextOneReducesAll) {
  for (const bool views : {false, true}) {
    const auto control = ThreadBackendControl::create(2);
    run_ranks(control, [&](int rank, const Group& group) {
      ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
      ToyModel reference = model.clone(at::kDouble);
      ReducerOptions options = small_buckets();
      options.gradient_as_bucket_view = views;
      Reducer reducer(model.parameters, {group}, options);
      for (int round = 0; round < 2; ++round) {
        model.zero_grad();
        reference.zero_grad();
        for (int micro = 0; micro < 3; ++micro) {
          const at::Tensor batch = apex::testing::random_batch(8, 4, 10 * round + micro);
          reducer.set_synchronizing(micro == 2);
          const size_t before = control->issued(rank);
          const at::Tensor y = model.forward(rows_of_rank(batch, rank, 2));
          reducer.watch_outputs({y});
          loss_of(y).backward();
          if (micro < 2) {
            EXPECT_EQ(control->issued(rank), before) << "communicated while off";
          }
          loss_of(reference.forward(batch)).backward();
        }
        for (size_t i = 0; i < model.size(); ++i) {
          EXPECT_LT(relative_error(model[i].grad(), reference[i].grad()), 1e-5)
              << views << ' ' << rank << ' ' << model.parameters[i].name;
        }
      }
    });
  }
}

TEST(Reducer, ParameterUsedOnlyWhileNotSynchronizing_NextBackward_ReducesItToo) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel a = ToyModel::mlp({4, 2}, 1);
    ToyModel b = ToyModel::mlp({4, 2}, 2);
    std::vector<NamedTensor> all = a.parameters;
    for (const auto& parameter : b.parameters)
      all.push_back({"b." + parameter.name, parameter.tensor});
    ToyModel a64 = a.clone(at::kDouble);
    ToyModel b64 = b.clone(at::kDouble);
    Reducer reducer(all, {group}, small_buckets());
    for (int round = 0; round < 3; ++round) {
      a.zero_grad(), b.zero_grad(), a64.zero_grad(), b64.zero_grad();
      const at::Tensor batch = apex::testing::random_batch(8, 4, round);
      reducer.set_synchronizing(false);
      loss_of(b.forward(rows_of_rank(batch, rank, 2))).backward();
      reducer.set_synchronizing(true);
      loss_of(a.forward(rows_of_rank(batch, rank, 2))).backward();
      loss_of(b64.forward(batch)).backward();
      loss_of(a64.forward(batch)).backward();
      for (size_t i = 0; i < a.size(); ++i) {
        EXPECT_LT(relative_error(a[i].grad(), a64[i].grad()), 1e-5);
        EXPECT_LT(relative_error(b[i].grad(), b64[i].grad()), 1e-5);
      }
    }
  });
}

TEST(Reducer, TwoBackwardsOnOneForward_Gradients_AreTheAverageOfBoth) {
  for (const bool views : {false, true}) {
    run_ranks(2, [&](int rank, const Group& group) {
      ToyModel model = ToyModel::mlp({4, 6, 3}, 1);
      ToyModel reference = model.clone(at::kDouble);
      ReducerOptions options = small_buckets();
      options.gradient_as_bucket_view = views;
      Reducer reducer(model.parameters, {group}, options);
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        reference.zero_grad();
        const at::Tensor batch = apex::testing::random_batch(8, 4, step);
        const at::Tensor y = model.forward(rows_of_rank(batch, rank, 2));
        reducer.watch_outputs({y});
        y.select(1, 0).square().mean().backward({}, /*retain_graph=*/true);
        y.select(1, 1).square().mean().backward();
        const at::Tensor z = reference.forward(batch);
        (z.select(1, 0).square().mean() + z.select(1, 1).square().mean()).backward();
        for (size_t i = 0; i < model.size(); ++i) {
          EXPECT_LT(relative_error(model[i].grad(), reference[i].grad()), 1e-5)
              << views << ' ' << step << ' ' << model.parameters[i].name;
        }
      }
    });
  }
}

TEST(Reducer, ParameterUsedTwiceInOneForward_Gradients_AreRight) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 4}, 1);
    ToyModel reference = model.clone(at::kDouble);
    Reducer reducer(model.parameters, {group}, small_buckets(1));
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      reference.zero_grad();
      const at::Tensor batch = apex::testing::random_batch(8, 4, step);
      loss_of(model.forward(model.forward(rows_of_rank(batch, rank, 2)))).backward();
      loss_of(reference.forward(reference.forward(batch))).backward();
      for (size_t i = 0; i < model.size(); ++i) {
        EXPECT_LT(relative_error(model[i].grad(), reference[i].grad()), 1e-5);
      }
    }
  });
}

TEST(Reducer, AutogradGrad_ThroughWatchedOutput_DoesNotSynchronize) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    Reducer reducer(model.parameters, {group}, small_buckets());
    train_step(reducer, model, apex::testing::random_batch(4, 4, rank));
    const size_t before = control->issued(rank);
    const at::Tensor x = apex::testing::random_batch(4, 4, rank).to(at::kFloat).requires_grad_();
    const at::Tensor y = model.forward(x);
    reducer.watch_outputs({y});
    if (rank == 0) {  // on one rank only: it would hang or fail if it took part in a collective
      const auto grads = torch::autograd::grad({y.sum()}, {x});
      EXPECT_TRUE(grads[0].defined());
    }
    EXPECT_EQ(control->issued(rank), before);
  });
}

// --- kinds of parameters ---

TEST(Reducer, SeveralDtypesAndLayouts_Backward_AllAreAveraged) {
  for (const bool views : {false, true}) {
    run_ranks(2, [&](int rank, const Group& group) {
      const auto leaf = [](at::Tensor t) { return t.requires_grad_(); };
      std::vector<NamedTensor> parameters{
          {"float", leaf(at::ones({3, 2}))},
          {"double", leaf(at::ones({4}, at::kDouble))},
          {"half", leaf(at::ones({5}, at::kHalf))},
          {"bfloat16", leaf(at::ones({6}, at::kBFloat16))},
          {"complex", leaf(at::ones({2, 2}, at::kComplexFloat))},
          {"transposed", leaf(at::ones({3, 4}).t().detach())},
          {"channels_last",
           leaf(at::ones({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast))},
          {"with_gaps", leaf(at::ones({4, 6}).slice(1, 0, 6, 2).detach())},
          {"empty", leaf(at::ones({0, 3}))},
          {"scalar", leaf(at::ones({}))},
          {"frozen", at::ones({3}, at::kLong)},
          {"frozen_float", at::ones({3})},
      };
      ReducerOptions options = small_buckets(8);
      options.gradient_as_bucket_view = views;
      Reducer reducer(parameters, {group}, options);
      for (int step = 0; step < 3; ++step) {
        at::Tensor loss = at::zeros({}, at::kDouble);
        for (auto& parameter : parameters) {
          if (!parameter.tensor.requires_grad()) continue;
          const at::Tensor x = parameter.tensor * parameter.tensor * (rank + 1.0);
          loss = loss + (x.is_complex() ? at::real(x) : x).sum().to(at::kDouble);
        }
        loss.backward();
        for (auto& parameter : parameters) {
          const at::Tensor& grad = parameter.tensor.grad();
          if (!parameter.tensor.requires_grad()) {
            EXPECT_FALSE(grad.defined());
            continue;
          }
          ASSERT_TRUE(grad.defined()) << parameter.name;
          EXPECT_EQ(grad.sizes(), parameter.tensor.sizes());
          EXPECT_EQ(grad.scalar_type(), parameter.tensor.scalar_type());
          EXPECT_LT(relative_error(grad, at::full_like(grad, 3.0)), 1e-2) << parameter.name;
          if (parameter.name != "with_gaps") {
            EXPECT_EQ(grad.strides(), parameter.tensor.strides()) << parameter.name;
          }
          parameter.tensor.mutable_grad() = at::Tensor();
        }
      }
    });
  }
}

TEST(Reducer, AlwaysFp32_HalfGradients_AreSummedWithoutOverflow) {
  for (const bool views : {false, true}) {
    run_ranks(4, [&](int rank, const Group& group) {
      at::Tensor p = at::ones({8}, at::kHalf).requires_grad_();
      ReducerOptions options;
      options.allreduce_always_fp32 = true;
      options.gradient_as_bucket_view = views;
      Reducer reducer({{"p", p}}, {group}, options);
      for (int step = 0; step < 2; ++step) {
        // 4 * 40000 overflows float16 (65504); the average does not.
        (p * 40000.0).sum().backward();
        EXPECT_EQ(p.grad().scalar_type(), at::kHalf);
        EXPECT_LT(relative_error(p.grad(), at::full({8}, 40000.0)), 1e-3) << rank;
        p.mutable_grad() = at::Tensor();
      }
    });
  }
}

TEST(Reducer, SparseGradient_Backward_IsAveragedAndStaysSparse) {
  run_ranks(2, [&](int rank, const Group& group) {
    at::Tensor table = at::ones({10, 3}).requires_grad_();
    at::Tensor dense = at::ones({3}).requires_grad_();
    Reducer reducer({{"table", table}, {"dense", dense}}, {group});
    for (int step = 0; step < 2; ++step) {
      const at::Tensor rows = at::tensor({rank, 5}, at::kLong);
      (at::embedding(table, rows, -1, false, /*sparse=*/true) * dense).sum().backward();
      ASSERT_EQ(table.grad().layout(), at::kSparse);
      at::Tensor expected = at::zeros({10, 3});
      expected[0] = 0.5;
      expected[1] = 0.5;
      expected[5] = 1.0;
      EXPECT_LT(relative_error(table.grad().to_dense(), expected), 1e-6);
      EXPECT_LT(relative_error(dense.grad(), at::full({3}, 2.0)), 1e-6);
      table.mutable_grad() = at::Tensor();
      dense.mutable_grad() = at::Tensor();
    }
  });
}

TEST(Reducer, SparseGradientMissingOnOneRank_Backward_IsAveragedWithZeros) {
  run_ranks(2, [&](int rank, const Group& group) {
    at::Tensor table = at::ones({10, 3}).requires_grad_();
    at::Tensor other = at::ones({3}).requires_grad_();
    Reducer reducer({{"table", table}, {"other", other}}, {group});
    for (int step = 0; step < 3; ++step) {
      table.mutable_grad() = at::Tensor();
      other.mutable_grad() = at::Tensor();
      at::Tensor loss = other.sum();
      if (step != 1 || rank == 0) {
        loss = loss + at::embedding(table, at::tensor({2}, at::kLong), -1, false, true).sum();
      }
      loss.backward();
      at::Tensor expected = at::zeros({10, 3});
      expected[2] = step == 1 ? 0.5 : 1.0;
      ASSERT_TRUE(table.grad().defined()) << "step " << step << ", rank " << rank;
      EXPECT_LT(relative_error(table.grad().to_dense(), expected), 1e-6) << step;
    }
  });
}

TEST(Reducer, LazilyConjugatedGradient_Backward_IsAveragedByValue) {
  for (const bool views : {false, true}) {
    run_ranks(2, [&](int rank, const Group& group) {
      const c10::complex<double> factor(1.0, rank + 1.0);
      at::Tensor p = at::ones({3}, at::kComplexDouble).requires_grad_();
      at::Tensor q = at::ones({3}, at::kComplexDouble).requires_grad_();
      ReducerOptions options;
      options.gradient_as_bucket_view = views;
      Reducer reducer({{"p", p}, {"q", q}}, {group}, options);
      for (int step = 0; step < 2; ++step) {
        p.mutable_grad() = at::Tensor();
        q.mutable_grad() = at::Tensor();
        // The gradient of conj() is a conjugated view of its incoming gradient.
        const at::Tensor scale = at::full({3}, factor, at::kComplexDouble);
        at::real(at::conj(p) * scale + at::conj(q) * scale).sum().backward();
        const at::Tensor expected =
            at::full({3}, c10::complex<double>(1.0, 1.5), at::kComplexDouble);
        EXPECT_LT(relative_error(p.grad(), expected), 1e-12) << p.grad();
        EXPECT_LT(relative_error(q.grad(), expected), 1e-12) << q.grad();
      }
    });
  }
}

TEST(Reducer, SharedParameter_GivenTwice_CountsOnce) {
  run_ranks(2, [&](int rank, const Group& group) {
    at::Tensor p = at::ones({3}).requires_grad_();
    Reducer reducer({{"encoder", p}, {"decoder", p}}, {group});
    EXPECT_EQ(reducer.parameters().size(), 1u);
    (p * p * (rank + 1.0)).sum().backward();
    EXPECT_LT(relative_error(p.grad(), at::full({3}, 3.0)), 1e-6);
  });
}

TEST(Reducer, ParameterFrozenAndUnfrozen_Plan_IsKept) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    ToyModel reference = model.clone(at::kDouble);
    Reducer reducer(model.parameters, {group}, small_buckets());
    for (int step = 0; step < 6; ++step) {
      const bool frozen = step == 2 || step == 3;
      model[0].requires_grad_(!frozen);
      reference[0].requires_grad_(!frozen);
      const at::Tensor batch = apex::testing::random_batch(8, 4, step);
      train_step(reducer, model, rows_of_rank(batch, rank, 2));
      reference.zero_grad();
      loss_of(reference.forward(batch)).backward();
      for (size_t i = 0; i < model.size(); ++i) {
        EXPECT_LT(relative_error(model[i].grad(), reference[i].grad()), 1e-5) << step;
      }
    }
    EXPECT_EQ(reducer.statistics().plans_recorded, 1);
  });
}

TEST(Reducer, TriggerParameters_Plan_ClosesBucketsThere) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
    ReducerOptions options;
    options.trigger_parameters = {4};  // the last weight: the first layer to be ready in backward
    Reducer reducer(model.parameters, {group}, options);
    train_step(reducer, model, apex::testing::random_batch(4, 4, rank));
    const auto plan = reducer.plan();
    ASSERT_TRUE(plan.has_value());
    ASSERT_EQ(plan->buckets.size(), 2u);
    EXPECT_EQ(plan->buckets[0].back(), 4);
  });
}

TEST(Reducer, DroppedWhileOutputsLive_Backward_StillSynchronizes) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 2}, 1);
    at::Tensor y;
    {
      Reducer reducer(model.parameters, {group});
      y = model.forward(at::full({1, 4}, rank + 1.0));
      reducer.watch_outputs({y});
    }
    y.sum().backward();
    EXPECT_LT(relative_error(model[0].grad(), at::full({2, 4}, 1.5)), 1e-6);
    // The hooks are destroyed with the graph.
    y = at::Tensor();
    model.zero_grad();
    model.forward(at::full({1, 4}, rank + 1.0)).sum().backward();
    EXPECT_LT(relative_error(model[0].grad(), at::full({2, 4}, rank + 1.0)), 1e-6);
  });
}

TEST(Reducer, SeveralGroups_Buckets_UseThemInTurn) {
  const auto first = ThreadBackendControl::create(2);
  const auto second = ThreadBackendControl::create(2);
  run_ranks(first, [&](int rank, const Group& group) {
    const Group other = apex::testing::make_thread_group(rank, second);
    ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
    Reducer reducer(model.parameters, {group, other}, small_buckets(20));
    for (int step = 0; step < 2; ++step) {
      train_step(reducer, model, apex::testing::random_batch(4, 4, rank));
    }
    EXPECT_GT(second->issued(rank, "allreduce"), 0u);
  });
}

}  // namespace
}  // namespace apex::parallel
