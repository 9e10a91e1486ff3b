// SPDX-License-Identifier: BSD-3-Clause
#include <cmath>

#include <gtest/gtest.h>

#include "reducer/reduction.h"

// The factors before and after the sum, with weights.

namespace apex::parallel::detail {
namespace {

ReducerOptions weighted() {
  ReducerOptions options;
  options.weighted = true;
  return options;
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
