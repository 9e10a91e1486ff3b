// SPDX-License-Identifier: BSD-3-Clause
// The reducer on ranks that are threads: averages against one process in float64, the order of
// launches, which the backend compares between ranks, and what only a backend for tests can show.
// Scenarios of training are in python/tests.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <apex/error.h>
#include <apex/parallel/comm_hook.h>
#include <apex/parallel/reducer.h>
#include <support/reducer_steps.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

namespace apex::parallel {
namespace {

using apex::testing::backward;
using apex::testing::loss_of;
using apex::testing::random_batch;
using apex::testing::relative_error;
using apex::testing::rows_of_rank;
using apex::testing::run_ranks;
using apex::testing::small_buckets;
using apex::testing::ThreadBackendControl;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

struct Mode {
  const char* name;
  int world;
  at::ScalarType dtype;
  int64_t cap;
  bool views;
  double tolerance;
  void (*set)(ReducerOptions&) = [](ReducerOptions&) {};
};

class ReducerModes : public ::testing::TestWithParam<Mode> {};

// Steps of SGD against one process with the whole batch in float64.
TEST_P(ReducerModes, Gradients_SeveralSteps_EqualConcatenatedBatchInFloat64) {
  const Mode mode = GetParam();
  run_ranks(mode.world, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({5, 7, 6, 3}, 7 + rank, mode.dtype);
    ReducerOptions options = small_buckets(mode.cap, mode.views);
    mode.set(options);
    Reducer reducer(model.parameters, {group}, options);
    ToyModel reference =
        ToyModel::mlp({5, 7, 6, 3}, 7, mode.dtype)
            .clone(at::isComplexType(mode.dtype) ? at::kComplexDouble : at::kDouble);
    for (size_t i = 0; i < model.size(); ++i) {
      ASSERT_EQ(relative_error(model[i], reference[i]), 0) << "rank 0's parameters were not taken";
    }
    const double factor = options.gradient_average
                              ? 1.0
                              : mode.world / options.gradient_predivide_factor;  // a sum of means
    for (int step = 0; step < 4; ++step) {
      const at::Tensor batch = random_batch(12, 5, 100 + step);
      const int64_t copied = reducer.statistics().gradients_copied;
      backward(reducer, model, rows_of_rank(batch, rank, mode.world));
      loss_of(reference.forward(batch)).backward();
      for (size_t i = 0; i < model.size(); ++i) {
        EXPECT_LT(relative_error(model[i].grad(), reference[i].grad() * factor), mode.tolerance)
            << mode.name << ", rank " << rank << ", step " << step << ", "
            << model.parameters[i].name;
      }
      if (mode.views && step == 2) {
        EXPECT_EQ(reducer.statistics().gradients_copied, copied) << "views that were kept";
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
    // A single bucket carries the report.
    EXPECT_EQ(reducer.statistics().launched_in_backward > 0,
              !options.delay_allreduce && reducer.plan()->buckets.size() > 1);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Table, ReducerModes,
    ::testing::Values(Mode{"TwoRanks", 2, at::kFloat, 40, false, 1e-5},
                      Mode{"FourRanks", 4, at::kFloat, 10, false, 1e-5},
                      Mode{"OneBucket", 2, at::kFloat, 10'000'000, false, 1e-5},
                      Mode{"ViewsThreeRanks", 3, at::kFloat, 1, true, 1e-5},
                      Mode{"Delayed", 2, at::kFloat, 40, false, 1e-5,
                           [](ReducerOptions& options) { options.delay_allreduce = true; }},
                      Mode{"Double", 2, at::kDouble, 40, false, 1e-12},
                      Mode{"Half", 2, at::kHalf, 40, false, 3e-2},
                      Mode{"BFloat16Views", 2, at::kBFloat16, 40, true, 2e-1},
                      Mode{"ComplexDoubleViews", 2, at::kComplexDouble, 40, true, 1e-12},
                      Mode{"SumPredivided", 2, at::kFloat, 40, false, 1e-5,
                           [](ReducerOptions& options) {
                             options.gradient_average = false;
                             options.gradient_predivide_factor = 4;
                           }},
                      Mode{"Predivided", 2, at::kFloat, 40, true, 1e-5,
                           [](ReducerOptions& options) { options.gradient_predivide_factor = 8; }}),
    [](const auto& info) { return std::string(info.param.name); });

/// Two branches of a model, and the parameters of both.
struct Branches {
  ToyModel a = ToyModel::mlp({4, 6, 2}, 1), b = ToyModel::mlp({4, 6, 2}, 2);
  std::vector<NamedTensor> all() const {
    std::vector<NamedTensor> all = a.parameters;
    for (const auto& [name, tensor] : b.parameters) all.push_back({"b." + name, tensor});
    return all;
  }
};

// Each rank chooses branches per step, so its gradients are ready in another order than on other
// ranks. The backend fails if ranks do not launch the same buckets in the same order.
TEST(Reducer, BranchesChosenPerRankAndStep_AverageWithZeros_AndNoneStaysNone) {
  // By step and rank: bit 0 branch a, bit 1 branch b.
  const int choice[][2] = {{1, 1}, {3, 3}, {1, 2}, {2, 2}, {3, 1}, {1, 1}, {2, 1}, {0, 2}, {0, 0}};
  for (const bool views : {false, true}) {
    for (const int64_t cap : {1, 20, 1000}) {
      run_ranks(2, [&](int rank, const Group& group) {
        Branches mine;
        Branches wide{mine.a.clone(at::kDouble), mine.b.clone(at::kDouble)};
        Reducer reducer(mine.all(), {group}, small_buckets(cap, views));
        for (size_t step = 0; step < std::size(choice); ++step) {
          const auto output = [&](const Branches& model, int who) {
            const at::Tensor input = random_batch(4, 4, 10 * step + who);
            // An output that requires grad even if no branch is taken.
            at::Tensor out = at::zeros({4, 2}, at::kDouble).requires_grad_();
            if (choice[step][who] & 1) out = out + model.a.forward(input);
            if (choice[step][who] & 2) out = out + model.b.forward(input);
            return out * 1.0;
          };
          for (ToyModel* model : {&mine.a, &mine.b, &wide.a, &wide.b}) model->zero_grad();
          reducer.prepare_for_forward();
          const at::Tensor y = output(mine, rank);
          reducer.watch_outputs({y});
          loss_of(y).backward();
          for (int who = 0; who < 2; ++who) (loss_of(output(wide, who)) / 2).backward();
          const auto actual = mine.all(), expected = wide.all();
          for (size_t i = 0; i < actual.size(); ++i) {
            EXPECT_LT(relative_error(actual[i].tensor.grad(), expected[i].tensor.grad()), 1e-5)
                << views << ' ' << cap << ", rank " << rank << " step " << step << ' '
                << actual[i].name;
          }
        }
        EXPECT_EQ(reducer.statistics().plans_recorded, 2) << "branch b appeared in the second step";
      });
    }
  }
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
      const at::Tensor late = at::ones({3}).requires_grad_();
      const at::Tensor table = at::randn({8, 4}).requires_grad_();
      ReducerOptions options = small_buckets(4);
      change(options);
      Reducer reducer({{"late", late}, {"table", table}}, {group}, options);
      const size_t before = control->issued(0);
      const at::Tensor rows = at::tensor({1, 5, 1}, at::kLong);
      for (const bool uses_late : {false, true, true}) {
        late.mutable_grad() = table.mutable_grad() = at::Tensor();
        reducer.prepare_for_forward();
        at::Tensor loss = at::embedding(table, rows, -1, false, /*sparse=*/true).sum();
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
}

TEST(Reducer, AutogradGradOfOneRank_ThroughWatchedOutput_DoesNotSynchronize) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    Reducer reducer(model.parameters, {group}, small_buckets());
    backward(reducer, model, random_batch(4, 4, rank));
    const size_t before = control->issued(rank);
    const at::Tensor x = random_batch(4, 4, rank).to(at::kFloat).requires_grad_();
    const at::Tensor y = model.forward(x);
    reducer.watch_outputs({y});
    if (rank == 0) {
      EXPECT_TRUE(torch::autograd::grad({y.sum()}, {x})[0].defined());
    }
    EXPECT_EQ(control->issued(rank), before);
  });
}

/// A function without an incoming gradient.
struct PassesNothingOn : torch::autograd::Function<PassesNothingOn> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {at::Tensor()};
  }
};

TEST(Reducer, GradientThatIsUndefined_OutputsNotWatched_IsNone) {
  run_ranks(2, [](int, const Group& group) {
    const at::Tensor p = at::ones({4}).requires_grad_();
    Reducer reducer({{"p", p}}, {group});
    for (int step = 0; step < 3; ++step) {
      reducer.prepare_for_forward();
      PassesNothingOn::apply(p).sum().backward();
      EXPECT_FALSE(p.grad().defined()) << "step " << step;
    }
    EXPECT_EQ(reducer.statistics().backwards, 3);
  });
}

/// Ranks exchange entries in one form, for any form of a rank's gradient.
TEST(Reducer, SparseGradientOfAnotherForm_Backward_IsAveraged) {
  run_ranks(2, [&](int rank, const Group& group) {
    const at::Tensor table = at::zeros({4, 2}).requires_grad_();
    Reducer reducer({{"table", table}}, {group});
    bool other = false;
    table.register_hook([&](const at::Tensor& grad) {
      return other ? grad.to_dense().to_sparse(/*sparse_dim=*/2) : grad;
    });
    for (int step = 0; step < 4; ++step) {
      other = step == 2 && rank == 1;
      table.mutable_grad() = at::Tensor();
      reducer.prepare_for_forward();
      const at::Tensor row = at::full({1}, rank, at::kLong);
      const at::Tensor y =
          at::embedding(table, row, -1, false, /*sparse=*/true).sum() * (rank + 1.0);
      reducer.watch_outputs({y});
      y.backward();
      const at::Tensor expected = at::tensor({0.5F, 1.0F, 0.0F, 0.0F}).view({4, 1}).expand({4, 2});
      EXPECT_TRUE(table.grad().to_dense().equal(expected)) << step;
    }
  });
}

// A module of C++ lists a parameter that two layers share twice.
TEST(Reducer, SharedParameter_GivenTwice_CountsOnce) {
  run_ranks(2, [&](int rank, const Group& group) {
    const at::Tensor p = at::ones({3}).requires_grad_();
    Reducer reducer({{"encoder", p}, {"decoder", p}}, {group});
    EXPECT_EQ(reducer.parameters().size(), 1u);
    (p * p * (rank + 1.0)).sum().backward();
    EXPECT_LT(relative_error(p.grad(), at::full({3}, 3.0)), 1e-6);
  });
}

TEST(Reducer, SeveralGroups_Buckets_UseThemInTurn) {
  const auto first = ThreadBackendControl::create(2);
  const auto second = ThreadBackendControl::create(2);
  run_ranks(first, [&](int rank, const Group& group) {
    const Group other = apex::testing::make_thread_group(rank, second);
    ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
    Reducer reducer(model.parameters, {group, other}, small_buckets(20));
    for (int step = 0; step < 2; ++step) backward(reducer, model, random_batch(4, 4, rank));
    EXPECT_GT(second->issued(rank, "allreduce"), 0u);
  });
}

/// float16 and bfloat16 have the same width, and float16 cannot represent large bfloat16 values.
TEST(ReducerCommHook, Compression_KeepsGradientsOfItsWidth_AndRefusesOtherDtypes) {
  run_ranks(2, [](int, const Group& group) {
    const at::Tensor p = at::ones({4}, at::kBFloat16).requires_grad_();
    Reducer reducer({{"p", p}}, {group});
    reducer.set_comm_hook(make_compress_hook(group, at::kHalf));
    reducer.prepare_for_forward();
    (p * 131072.0).sum().backward();
    EXPECT_TRUE(p.grad().equal(at::full({4}, 131072.0, at::kBFloat16))) << p.grad();
    using apex::testing::message_of;
    apex::testing::expect_contains(
        message_of<InvalidArgument>([&] { make_compress_hook(group, at::kFloat); }),
        "float16 or bfloat16, got Float");
    apex::testing::expect_contains(
        message_of<InvalidArgument>([&] { make_compress_hook({}, at::kHalf); }),
        "needs a process group");
  });
}

}  // namespace
}  // namespace apex::parallel
