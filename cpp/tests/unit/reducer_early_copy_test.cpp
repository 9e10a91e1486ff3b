// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <stdexcept>

#include <ATen/ATen.h>

#include <apex/parallel/reducer.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

// Gradients that are copied into their bucket as soon as they are computed, and changes to them
// before the bucket is launched. See Note [Gradients that move into their bucket].

namespace apex::parallel {
namespace {

using apex::testing::relative_error;
using apex::testing::run_ranks;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr size_t kFirstWeight = 0;
constexpr size_t kLastWeight = 4;  // its gradient is ready first

/// 0: gradients keep their memory. 1: gradients are views of the buckets.
class ReducerEarlyCopy : public ::testing::TestWithParam<bool> {
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

INSTANTIATE_TEST_SUITE_P(CopiesAndViews, ReducerEarlyCopy, ::testing::Bool());

TEST_P(ReducerEarlyCopy, EveryGradient_Backward_IsCopiedWhenItIsComputed) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = this->model();
    Reducer reducer(model.parameters, {group}, one_bucket());
    step(reducer, model, batch(rank));
    const auto before = reducer.statistics();
    step(reducer, model, batch(rank));
    const auto after = reducer.statistics();
    EXPECT_EQ(after.gradients_copied - before.gradients_copied, 6);
    EXPECT_EQ(after.gradients_copied_early - before.gradients_copied_early, 6);
  });
}

TEST_P(ReducerEarlyCopy, GradientChangedByAHookBeforeTheLaunch_Average_IsOfTheChangedOne) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = this->model();
    Reducer reducer(model.parameters, {group}, one_bucket());
    // Runs after the last layer's gradient was copied.
    bool change = false;
    model[kFirstWeight].register_hook([&](const at::Tensor&) -> void {
      if (!change) return;
      at::Tensor& grad = model[kLastWeight].mutable_grad();
      if (grad.defined()) {
        grad.mul_(3.0);
      } else {
        grad = at::full_like(model[kLastWeight], 7.0);  // the gradient has moved
      }
    });
    step(reducer, model, batch(rank));
    change = true;
    step(reducer, model, batch(rank));
    ToyModel reference =
        expected(2, [](ToyModel& one, int r) { one.forward(batch(r)).square().mean().backward(); });
    at::Tensor& changed = reference[kLastWeight].mutable_grad();
    if (GetParam()) {
      changed.fill_(7.0);
    } else {
      changed.mul_(3.0);
    }
    expect_gradients(model, reference);
  });
}

TEST_P(ReducerEarlyCopy, ParameterFiresAgainBeforeTheLaunch_Average_IsOfTheSum) {
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

TEST_P(ReducerEarlyCopy, BackwardFailsBeforeTheLaunch_Gradients_AreTheRanksOwnAndReducedNextTime) {
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

TEST(ReducerEarlyCopyViews, NonFiniteGradientThatMoved_CheckFinite_FindsIt) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    ReducerOptions options;
    options.gradient_as_bucket_view = true;
    options.check_finite = true;
    Reducer reducer(model.parameters, {group}, options);
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      at::Tensor x = apex::testing::random_batch(8, 4, step);
      if (step == 1 && rank == 1) x.fill_(std::numeric_limits<double>::quiet_NaN());
      const at::Tensor y = model.forward(x);
      reducer.watch_outputs({y});
      if (step == 0) {
        y.square().mean().backward();
      } else {
        EXPECT_THROW(y.square().mean().backward(), std::exception);
      }
    }
  });
}

}  // namespace
}  // namespace apex::parallel
