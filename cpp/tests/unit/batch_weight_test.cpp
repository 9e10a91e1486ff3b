// SPDX-License-Identifier: BSD-3-Clause
#include "reducer/batch_weight.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <apex/error.h>

#include "reducer/averaging.h"

// A rank's weight after a sequence of blocks and backwards, and the resulting factors.

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
  EXPECT_THROW(weight.enter(at::ones({}, at::kMeta)), InvalidArgument);
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

TEST(BatchWeight, NegativeOrInfinite_IsNotHiddenByOthers) {
  BatchWeight weight;
  for (const double samples : {5.0, -3.0, 4.0}) {
    weight.enter(number(samples));
    weight.backward_began();
    weight.leave();
  }
  EXPECT_EQ(weight.value(), -3);
}

TEST(Averaging, Weighted_FloatIsSummedAsItIs) {
  const Averaging factors = averaging_of(weighted(), {}, at::kFloat, 3, 3, 48);
  EXPECT_EQ(factors.before, 1.0);
  EXPECT_EQ(factors.after, 1.0 / 48);
}

// If the terms fit into half, so does their sum: the scale is a power of two and is undone exactly.
TEST(Averaging, Weighted_HalfIsScaledByTheNumberOfRanks) {
  for (const int64_t ranks : {1, 2, 3, 4, 5, 8}) {
    const Averaging factors = averaging_of(weighted(), {}, at::kHalf, ranks, ranks, 48);
    int exponent = 0;
    EXPECT_EQ(std::frexp(factors.before, &exponent), 0.5) << ranks;  // a power of two
    EXPECT_LE(factors.before * static_cast<double>(ranks), 1.0);
    EXPECT_GT(factors.before * static_cast<double>(ranks), 0.5);
    EXPECT_EQ(factors.before * factors.after, 1.0 / 48);
  }
}

TEST(Averaging, Weighted_AverageOfACommunicationHookIsUndone) {
  ReductionTraits hook;
  hook.averages = true;
  const Averaging factors = averaging_of(weighted(), hook, at::kFloat, 3, 3, 48);
  EXPECT_EQ(factors.before, 1.0);
  EXPECT_EQ(factors.after, 3.0 / 48);
}

}  // namespace
}  // namespace apex::parallel::detail
