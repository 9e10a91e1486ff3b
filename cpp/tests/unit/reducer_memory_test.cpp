// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <apex/parallel/reducer.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

// Gradients whose memory has another reader: autograd, another parameter's .grad, the caller.
// Oracle: the same program without a reducer in float64, averaged. See
// Note [Gradients in their bucket].

namespace apex::parallel {
namespace {

using apex::testing::relative_error;
using apex::testing::run_ranks;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kWorld = 2;
constexpr int64_t kSide = 160;  // 100 KiB

using Tensors = std::vector<at::Tensor>;

/// A program over parameters. It runs backward itself, scaled by a rank-dependent number.
struct Program {
  const char* name;
  std::vector<std::vector<int64_t>> shapes;
  std::function<void(const Tensors& p, double rank_scale)> run;
};

const Program kPrograms[] = {
    {"a parameter added with a dimension in front, batch of one",
     {{kSide, kSide}, {kSide, kSide}},
     [](const Tensors& p, double scale) {
       const at::Tensor x = (p[1] * scale).unsqueeze(0);
       (x + p[0].unsqueeze(0)).square().sum().backward();
     }},
    {"views of two parameters added",
     {{kSide, kSide}, {kSide * kSide}},
     [](const Tensors& p, double scale) {
       (p[0].view({-1}) * 1.0 + p[1].view({-1})).mul(scale).square().sum().backward();
     }},
    {"two leaves added, so that their gradients are one tensor",
     {{kSide, kSide}, {kSide, kSide}},
     [](const Tensors& p, double scale) { (p[0] + p[1]).mul(scale).square().sum().backward(); }},
    {"a transposed parameter added to what depends on another",
     {{kSide, kSide}, {kSide, kSide}},
     [](const Tensors& p, double scale) {
       const at::Tensor h = (p[1] * scale).tanh();
       (h + p[0].t()).square().sum().backward();
     }},
    {"a chain in which each gradient passes on the one before",
     {{kSide, kSide}, {kSide, kSide}, {kSide, kSide}},
     [](const Tensors& p, double scale) {
       const at::Tensor one = p[2].view({1, kSide, kSide}) * scale;
       const at::Tensor two = one + p[1].view({1, kSide, kSide});
       (two.expand({1, kSide, kSide}) + p[0].unsqueeze(0)).square().sum().backward();
     }},
    {"slices of one parameter that are put together again",
     {{kSide, kSide}, {kSide, kSide}},
     [](const Tensors& p, double scale) {
       const auto halves = p[0].chunk(2);
       (at::cat({halves[0], halves[1]}) + p[1]).mul(scale).square().sum().backward();
     }},
};

class ReducerMemory : public ::testing::TestWithParam<std::tuple<size_t, bool, bool>> {};

TEST_P(ReducerMemory, GradientsThatShareMemory_SeveralSteps_EqualTheReference) {
  const Program& program = kPrograms[std::get<0>(GetParam())];
  const bool views = std::get<1>(GetParam());
  const bool clear_in_place = std::get<2>(GetParam());
  run_ranks(kWorld, [&](int rank, const Group& group) {
    Tensors p, reference;
    std::vector<NamedTensor> named;
    for (size_t i = 0; i < program.shapes.size(); ++i) {
      const int64_t numel = c10::multiply_integers(program.shapes[i]);
      const at::Tensor value =
          at::linspace(-1, 1 + static_cast<double>(i), numel).view(program.shapes[i]);
      p.push_back(value.clone().requires_grad_());
      reference.push_back(value.to(at::kDouble).requires_grad_());
      named.push_back({"p" + std::to_string(i), p.back()});
    }
    ReducerOptions options;
    options.limits.cap = 1;  // a bucket per parameter
    options.gradient_as_bucket_view = views;
    Reducer reducer(named, {group}, options);
    for (int step = 0; step < 3; ++step) {
      for (size_t i = 0; i < p.size(); ++i) {
        if (clear_in_place && p[i].grad().defined()) {
          p[i].mutable_grad().zero_();
        } else {
          p[i].mutable_grad() = at::Tensor();
        }
      }
      reducer.prepare_for_forward();
      program.run(p, rank + step + 1.0);
      Tensors expected(p.size());
      for (int r = 0; r < kWorld; ++r) {
        // Each starts without gradients: accumulating into gradients that share memory adds to
        // both.
        for (const at::Tensor& variable : reference) variable.mutable_grad() = at::Tensor();
        program.run(reference, r + step + 1.0);
        for (size_t i = 0; i < p.size(); ++i) {
          const at::Tensor mine = reference[i].grad() / kWorld;
          expected[i] = expected[i].defined() ? expected[i] + mine : mine;
        }
      }
      for (size_t i = 0; i < p.size(); ++i) {
        EXPECT_LT(relative_error(p[i].grad(), expected[i]), 1e-5)
            << program.name << ": step " << step << ", p" << i;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Table, ReducerMemory,
                         ::testing::Combine(::testing::Range(size_t{0}, std::size(kPrograms)),
                                            ::testing::Bool(), ::testing::Bool()));

/// A function without an incoming gradient: there is no memory to compare with.
struct PassesNothingOn : torch::autograd::Function<PassesNothingOn> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {at::Tensor()};
  }
};

TEST(ReducerMemory, GradientThatIsUndefined_OutputsNotWatched_IsNone) {
  run_ranks(kWorld, [](int, const Group& group) {
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

TEST(ReducerMemory, GradientArgumentThatTheCallerKeeps_IsNotWritten) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    const at::Tensor p = at::ones({kSide, kSide}).requires_grad_();
    Reducer reducer({{"p", p}}, {group});
    for (int step = 0; step < 3; ++step) {
      p.mutable_grad() = at::Tensor();
      reducer.prepare_for_forward();
      const at::Tensor given = at::full({kSide, kSide}, rank + 1.0);
      const at::Tensor kept = given.view({-1});
      torch::autograd::backward({p.view({kSide, kSide})}, {given});
      EXPECT_TRUE(kept.equal(at::full({kSide * kSide}, rank + 1.0))) << "step " << step;
      EXPECT_TRUE(p.grad().equal(at::full({kSide, kSide}, 1.5))) << "step " << step;
    }
  });
}

TEST(ReducerMemory, ViewOfAGradientThatAHookKeeps_HoldsWhatItHeld) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    const at::Tensor p = at::ones({kSide, kSide}).requires_grad_();
    Tensors kept;
    p.register_hook([&](const at::Tensor& grad) -> void { kept.push_back(grad.view({-1})); });
    Reducer reducer({{"p", p}}, {group});
    for (int step = 0; step < 3; ++step) {
      p.mutable_grad() = at::Tensor();
      reducer.prepare_for_forward();
      (p * (rank + 1.0)).sum().backward();
      EXPECT_TRUE(kept.back().equal(at::full({kSide * kSide}, rank + 1.0))) << "step " << step;
      EXPECT_TRUE(p.grad().equal(at::full({kSide, kSide}, 1.5))) << "step " << step;
    }
  });
}

/// A caller may replace a gradient's memory, or write it between backwards.
TEST(ReducerMemory, GradientThatIsReplacedOrRestrided_Backward_SendsWhatItHolds) {
  for (const bool views : {true, false}) {
    const std::vector<std::function<void(const at::Tensor&)>> ways{
        [](const at::Tensor& p) { p.mutable_grad().set_data(at::full_like(p, 3.0)); },
        [](const at::Tensor& p) { p.mutable_grad() = at::full_like(p, 3.0); },
        [](const at::Tensor& p) { p.mutable_grad().zero_().add_(3.0); },
        [](const at::Tensor& p) { p.mutable_grad() = at::full({4, 8}, 3.0).t(); },
        [](const at::Tensor& p) { p.mutable_grad() = at::full({1}, 3.0).expand({8, 4}).clone(); },
    };
    for (size_t way = 0; way < ways.size(); ++way) {
      run_ranks(kWorld, [&](int rank, const Group& group) {
        const at::Tensor p = at::ones({8, 4}).requires_grad_();
        const at::Tensor q = at::ones({3}).requires_grad_();
        ReducerOptions options;
        options.gradient_as_bucket_view = views;
        Reducer reducer({{"p", p}, {"q", q}}, {group}, options);
        const auto run = [&] {
          reducer.prepare_for_forward();
          ((p * (rank + 1.0)).sum() + q.sum()).backward();
        };
        run();
        run();
        ways[way](p);
        run();
        EXPECT_TRUE(p.grad().equal(at::full({8, 4}, 4.5))) << "way " << way << ": " << p.grad()[0];
        run();
        EXPECT_TRUE(p.grad().equal(at::full({8, 4}, 6.0))) << "way " << way << ": " << p.grad()[0];
      });
    }
  }
}

TEST(ReducerMemory, LargeParameterUnusedEverywhere_Backward_LeavesItsGradient) {
  run_ranks(kWorld, [&](int rank, const Group& group) {
    const at::Tensor used = at::ones({3}).requires_grad_();
    const at::Tensor large = at::ones({kSide, kSide}).requires_grad_();
    ReducerOptions options;
    options.limits.cap = 1;
    Reducer reducer({{"used", used}, {"large", large}}, {group}, options);
    for (int step = 0; step < 4; ++step) {
      used.mutable_grad() = at::Tensor();
      // Different values per rank, since the average of equal ones would change nothing.
      large.mutable_grad() = step < 2 ? at::Tensor() : at::full({kSide, kSide}, rank + 7.0F);
      reducer.prepare_for_forward();
      at::Tensor y = used.sum() * (rank + 1.0);
      if (step < 2) y = y + large.sum() * (rank + 1.0);
      reducer.watch_outputs({y});
      y.backward();
      EXPECT_TRUE(used.grad().equal(at::full({3}, 1.5))) << step;
      const double expected = step < 2 ? 1.5 : rank + 7.0;
      EXPECT_TRUE(large.grad().equal(at::full({kSide, kSide}, expected))) << step;
    }
  });
}

TEST(ReducerMemory, BackwardThatRaisesBeforeAnyGradient_LeavesGradients) {
  for (const bool views : {true, false}) {
    run_ranks(kWorld, [&](int rank, const Group& group) {
      const at::Tensor p = at::ones({4}).requires_grad_();
      ReducerOptions options;
      options.gradient_as_bucket_view = views;
      Reducer reducer({{"p", p}}, {group}, options);
      for (int step = 0; step < 4; ++step) {
        const bool fail = step == 2;
        if (!fail) p.mutable_grad() = at::Tensor();
        reducer.prepare_for_forward();
        const at::Tensor h = p * (rank + 1.0);
        h.register_hook([fail](const at::Tensor&) -> void {
          if (fail) throw std::runtime_error("user error");
        });
        const at::Tensor y = h.sum();
        reducer.watch_outputs({y});
        if (fail) {
          EXPECT_THROW(y.backward(), std::exception);
        } else {
          y.backward();
        }
        ASSERT_TRUE(p.grad().defined()) << step << ", views " << views;
        EXPECT_TRUE(p.grad().equal(at::full({4}, 1.5))) << step << ", views " << views;
      }
    });
  }
}

/// Ranks exchange entries in one form, for any form of a rank's gradient.
TEST(ReducerMemory, SparseGradientOfAnotherForm_Backward_IsAveraged) {
  run_ranks(kWorld, [&](int rank, const Group& group) {
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

// --- changes to gradients that were copied into their bucket, before it is launched ---

constexpr size_t kFirstWeight = 0;
constexpr size_t kLastWeight = 4;  // its gradient is ready first

/// 0: gradients keep their memory. 1: gradients are views of the buckets.
class ReducerFilledBucket : public ::testing::TestWithParam<bool> {
 protected:
  /// All parameters in one bucket, which is launched when the first layer's gradients are ready.
  ReducerOptions one_bucket() const {
    ReducerOptions options;
    options.gradient_as_bucket_view = GetParam();
    return options;
  }

  static ToyModel model() { return ToyModel::mlp({4, 6, 6, 2}, 1); }
  static at::Tensor batch(int rank) { return apex::testing::random_batch(8, 4, 20 + rank); }

  static void step(Reducer& reducer, ToyModel& model, const at::Tensor& x) {
    model.zero_grad();
    reducer.prepare_for_forward();
    const at::Tensor y = model.forward(x);
    reducer.watch_outputs({y});
    y.square().mean().backward();
  }

  /// The float64 average over ranks of the gradients that each rank's backward accumulates.
  static ToyModel expected(int world, const std::function<void(ToyModel&, int)>& backward) {
    ToyModel sum = model().clone(at::kDouble);
    for (int rank = 0; rank < world; ++rank) backward(sum, rank);
    for (auto& parameter : sum.parameters) parameter.tensor.mutable_grad().div_(world);
    return sum;
  }

  static void expect_gradients(const ToyModel& model, const ToyModel& reference) {
    for (size_t i = 0; i < model.size(); ++i) {
      EXPECT_LT(relative_error(model[i].grad(), reference[i].grad()), 1e-5)
          << model.parameters[i].name;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(CopiesAndViews, ReducerFilledBucket, ::testing::Bool());

TEST_P(ReducerFilledBucket, GradientChangedByAHookBeforeTheLaunch_Average_IsOfTheChangedOne) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = this->model();
    Reducer reducer(model.parameters, {group}, one_bucket());
    // Runs after the last layer's gradient was copied.
    bool change = false;
    model[kFirstWeight].register_hook([&](const at::Tensor&) -> void {
      if (change) model[kLastWeight].mutable_grad().mul_(3.0);
    });
    step(reducer, model, batch(rank));
    change = true;
    step(reducer, model, batch(rank));
    ToyModel reference =
        expected(2, [](ToyModel& one, int r) { one.forward(batch(r)).square().mean().backward(); });
    reference[kLastWeight].mutable_grad().mul_(3.0);
    expect_gradients(model, reference);
  });
}

TEST_P(ReducerFilledBucket, ParameterFiresAgainBeforeTheLaunch_Average_IsOfTheSum) {
  run_ranks(3, [&](int rank, const Group& group) {  // 1/3 is not a power of two
    ToyModel model = this->model();
    Reducer reducer(model.parameters, {group}, one_bucket());
    // A reentrant backward, as from a checkpointed segment, that this rank has not run while
    // recording.
    bool again = false;
    model[kFirstWeight].register_hook([&](const at::Tensor&) -> void {
      if (!again) return;
      const at::AutoGradMode grad_mode(true);
      (model[kLastWeight] * 2.0).sum().backward();
    });
    step(reducer, model, batch(rank));
    again = true;
    step(reducer, model, batch(rank));
    ToyModel reference = expected(3, [](ToyModel& one, int r) {
      one.forward(batch(r)).square().mean().backward();
      (one[kLastWeight] * 2.0).sum().backward();
    });
    expect_gradients(model, reference);
  });
}

TEST_P(ReducerFilledBucket,
       BackwardFailsBeforeTheLaunch_Gradients_AreTheRanksOwnAndReducedNextTime) {
  run_ranks(3, [&](int rank, const Group& group) {
    ToyModel model = this->model();
    Reducer reducer(model.parameters, {group}, one_bucket());
    bool fail = false;
    model[kFirstWeight].register_hook([&](const at::Tensor&) -> void {
      if (fail) throw std::runtime_error("user error");
    });
    step(reducer, model, batch(rank));
    fail = true;
    EXPECT_THROW(step(reducer, model, batch(rank)), std::exception);
    fail = false;
    ToyModel own = this->model().clone(at::kDouble);
    own.forward(batch(rank)).square().mean().backward();
    for (size_t i = kLastWeight; i < model.size(); ++i) {
      EXPECT_LT(relative_error(model[i].grad(), own[i].grad()), 1e-5) << model.parameters[i].name;
    }
    // Not cleared, so it is included in the next reduction.
    const at::Tensor y = model.forward(batch(rank));
    reducer.watch_outputs({y});
    y.square().mean().backward();
    ToyModel reference =
        expected(3, [](ToyModel& one, int r) { one.forward(batch(r)).square().mean().backward(); });
    EXPECT_LT(relative_error(model[kLastWeight].grad(), reference[kLastWeight].grad() * 2), 1e-5);
  });
}

}  // namespace
}  // namespace apex::parallel
