// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/batch_weight.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <apex/error.h>

#include "reducer/averaging.h"

// What a rank's samples weigh, by a sequence of blocks and backwards; and by what is multiplied.

namespace apex::parallel::detail {
namespace {

at::Tensor number(double value) { return at::scalar_tensor(value, at::kDouble); }

TEST(BatchWeight, BackwardsOfTheSameSamples_CountOnce) {
  BatchWeight weight;
  weight.enter(number(3));
  weight.backward_began();
  weight.backward_began();
  EXPECT_EQ(weight.value(), 3);
  weight.leave();
  EXPECT_EQ(weight.value(), 3);
}

TEST(BatchWeight, SamplesThatAccumulate_AddUp_UntilReset) {
  BatchWeight weight;
  for (const double samples : {2.0, 0.0, 5.0}) {
    weight.enter(number(samples));
    weight.backward_began();
    weight.leave();
  }
  EXPECT_EQ(weight.value(), 7);
  weight.reset();
  EXPECT_EQ(weight.value(), 0);
}

TEST(BatchWeight, BlockWithoutABackward_CountsNothing) {
  BatchWeight weight;
  weight.enter(number(3));
  weight.leave();
  EXPECT_EQ(weight.value(), 0);
}

TEST(BatchWeight, SecondSynchronizedBackwardInABlock_CountsAgain) {
  BatchWeight weight;
  weight.enter(number(3));
  weight.backward_began();
  weight.reset();
  weight.backward_began();
  EXPECT_EQ(weight.value(), 3);
}

TEST(BatchWeight, BackwardOutsideOfABlock_IsMissing_UntilReset) {
  BatchWeight weight;
  weight.backward_began();
  weight.enter(number(3));
  weight.backward_began();
  weight.leave();
  EXPECT_TRUE(std::isnan(weight.value()));
  weight.reset();
  EXPECT_EQ(weight.value(), 0);
}

TEST(BatchWeight, TensorThatIsChangedLater_CountsAsItWas) {
  BatchWeight weight;
  const at::Tensor samples = at::ones({1}, at::kLong).fill_(4);
  weight.enter(samples);
  samples.fill_(9);
  weight.backward_began();
  weight.leave();
  EXPECT_EQ(weight.value(), 4);
}

TEST(BatchWeight, NestedOrNotOneNumber_Throws) {
  BatchWeight weight;
  EXPECT_THROW(weight.enter(at::ones({2})), InvalidArgument);
  EXPECT_THROW(weight.enter(at::Tensor()), InvalidArgument);
  EXPECT_THROW(weight.enter(at::ones({}, at::kComplexFloat)), InvalidArgument);
  weight.enter(number(1));
  EXPECT_THROW(weight.enter(number(1)), Error);
  weight.leave();
  weight.enter(number(1));
}

ReducerOptions weighted() {
  ReducerOptions options;
  options.weighted = true;
  return options;
}

TEST(Averaging, Weighted_FloatIsSummedAsItIs) {
  WeightSum weights;
  weights.total = 48;
  weights.rescale();
  const Averaging factors = averaging_of(weighted(), {}, at::kFloat, 3, 3, weights);
  EXPECT_EQ(factors.before, 1.0);
  EXPECT_EQ(factors.after, 1.0 / 48);
}

TEST(Averaging, Weighted_HalfIsScaledByAPowerOfTwoThatIsUndone) {
  for (const double total : {0.3, 1.0, 48.0, 1e6}) {
    WeightSum weights;
    weights.total = total;
    weights.rescale();
    const Averaging factors = averaging_of(weighted(), {}, at::kHalf, 3, 3, weights);
    int exponent = 0;
    EXPECT_EQ(std::frexp(factors.before, &exponent), 0.5) << total;  // a power of two
    EXPECT_GE(factors.before * total, 1.0);
    EXPECT_LT(factors.before * total, 2.0);
    EXPECT_EQ(factors.before * factors.after, 1.0 / total);
  }
}

TEST(Averaging, Weighted_AverageOfACommunicationHookIsUndone) {
  ReductionTraits hook;
  hook.averages = true;
  WeightSum weights;
  weights.total = 48;
  weights.rescale();
  const Averaging factors = averaging_of(weighted(), hook, at::kFloat, 3, 3, weights);
  EXPECT_EQ(factors.before, 1.0 / 32);
  EXPECT_EQ(factors.before * factors.after, 3.0 / 48);
}

TEST(Averaging, Weighted_TotalOfZeroKeepsTheScale) {
  WeightSum weights;
  weights.total = 48;
  weights.rescale();
  weights.total = 0;
  weights.rescale();
  EXPECT_EQ(weights.scale, 32);
  EXPECT_EQ(averaging_of(weighted(), {}, at::kFloat, 3, 3, weights).after, 0.0);
}

}  // namespace
}  // namespace apex::parallel::detail
