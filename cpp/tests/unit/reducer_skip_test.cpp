// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>

#include <apex/parallel/comm_hook.h>
#include <apex/parallel/reducer.h>
#include <support/reducer_steps.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

// Steps that all ranks skip together, and steps inside backward, which are refused. Oracle: the
// float64 average over ranks; after a skipped step no rank has a gradient. See
// Note [Skipped steps].

namespace apex::parallel {
namespace {

using apex::testing::batch;
using apex::testing::expect_average;
using apex::testing::forward;
using apex::testing::loss_of;
using apex::testing::run_ranks;
using apex::testing::thrown_by;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kWorld = 3;
const std::vector<int64_t> kWidths{4, 6, 6, 2};

void step(Reducer& reducer, const ToyModel& model, int rank, int number) {
  loss_of(forward(reducer, model, batch(rank, number))).backward();
}

void expect_no_gradients(const ToyModel& model) {
  for (const NamedTensor& parameter : model.parameters)
    EXPECT_FALSE(parameter.tensor.grad().defined()) << parameter.name;
}

class ReducerSkip : public ::testing::TestWithParam<std::tuple<int64_t, bool, bool>> {
 protected:
  ReducerOptions options() const {
    ReducerOptions options;
    options.limits.cap = std::get<0>(GetParam());
    options.gradient_as_bucket_view = std::get<1>(GetParam());
    return options;
  }
  bool hooked() const { return std::get<2>(GetParam()); }
};

TEST_P(ReducerSkip, OneRankWithoutALoss_NoRankHasAGradient_AndTheNextStepIsRight) {
  run_ranks(kWorld, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp(kWidths, 1);
    Reducer reducer(model.parameters, {group}, options());
    if (hooked()) reducer.set_comm_hook(make_compress_hook(reducer.communicator(), at::kHalf));
    for (int number = 0; number < 7; ++number) {
      model.zero_grad();
      const bool skips = number % 3 == 0;
      if (skips && rank == number % 2) {
        reducer.skip_step().backward();
      } else {
        step(reducer, model, rank, number);
      }
      EXPECT_EQ(reducer.step_skipped(), skips) << number;
      if (skips) {
        expect_no_gradients(model);
      } else if (!hooked()) {
        expect_average(model, kWorld, number, "after a skipped step");
      }
    }
    EXPECT_EQ(reducer.statistics().steps_skipped, 3);
  });
}

TEST_P(ReducerSkip, ExceptionOnOneRank_WithSkipFailedSteps_TheOthersSkip) {
  run_ranks(kWorld, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp(kWidths, 1);
    ReducerOptions skipping = options();
    skipping.skip_failed_steps = true;
    Reducer reducer(model.parameters, {group}, skipping);
    if (hooked()) reducer.set_comm_hook(make_compress_hook(reducer.communicator(), at::kHalf));
    bool fails = false;
    model[0].register_hook([&](const at::Tensor&) -> void {  // its gradient comes last
      if (fails) throw std::runtime_error("user error");
    });
    for (int number = 0; number < 6; ++number) {
      model.zero_grad();
      const bool skips = number % 2 == 0;
      fails = skips && rank == 1;
      EXPECT_EQ(thrown_by([&] { step(reducer, model, rank, number); }), fails ? "user error" : "");
      EXPECT_EQ(reducer.step_skipped(), skips) << number;
      if (skips) {
        expect_no_gradients(model);
      } else if (!hooked()) {
        expect_average(model, kWorld, number, "after a failed step");
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Table, ReducerSkip,
                         ::testing::Combine(::testing::Values(1, 40, 10'000'000), ::testing::Bool(),
                                            ::testing::Bool()));

TEST(ReducerEarlyStep, InAGradientsHook_IsRefused_AndNamed) {
  run_ranks(2, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp(kWidths, 1);
    Reducer reducer(model.parameters, {group});
    step(reducer, model, rank, 0);
    std::string refused;
    const auto hook = model[2].register_hook([&](const at::Tensor&) -> void {
      refused = thrown_by([&] { Reducer::optimizer_steps({model[0], model[2]}); });
    });
    model.zero_grad();
    step(reducer, model, rank, 1);
    EXPECT_NE(refused.find(model.parameters[0].name), std::string::npos) << refused;
    expect_average(model, 2, 1, "refused before it was written");
    model[2].remove_hook(hook);
    Reducer::optimizer_steps({model[0], model[2]});  // between backwards
    model[2].register_hook([&](const at::Tensor&) -> void {
      const at::NoGradGuard guard;
      model[2].mul_(2);
    });
    const std::string error = thrown_by([&] { step(reducer, model, rank, 2); });
    EXPECT_NE(error.find("is updated inside backward"), std::string::npos) << error;
    EXPECT_NE(error.find("'" + model.parameters[2].name + "'"), std::string::npos) << error;
  });
}

}  // namespace
}  // namespace apex::parallel
