// SPDX-License-Identifier: BSD-3-Clause
#include "step/gradient_history.h"

#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

namespace apex::parallel {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
using Ids = std::vector<int64_t>;

std::vector<RankGradient> of(const std::vector<double>& norms) {
  std::vector<RankGradient> ranks;
  for (const double norm : norms) ranks.push_back({norm * norm, 1});
  return ranks;
}

// Inputs are the expected values for tr(S) = 6 and |G|^2 = 5, of ranks with 1, 2 and 3 samples.
TEST(GradientHistory, NoiseAndSignal_OfTheirExpectations_AreExact) {
  GradientHistory history;
  const std::vector<RankGradient> ranks{{5 + 6.0 / 1, 1}, {5 + 6.0 / 2, 2}, {5 + 6.0 / 3, 3}};
  history.add(1, ranks, 5 + 6.0 / 6, 7.5);
  EXPECT_NEAR(history.last().noise, 6, 1e-12);
  EXPECT_NEAR(history.last().signal, 5, 1e-12);
  EXPECT_NEAR(history.last().noise_scale, 1.2, 1e-12);
  EXPECT_EQ(history.last().norm, 7.5);
  EXPECT_EQ(history.last().backward, 1);
  EXPECT_EQ(history.last().rank_norms[0], std::sqrt(11.0));
}

TEST(GradientHistory, RanksWithoutSamples_DoNotCount) {
  GradientHistory history;
  history.add(1, {{11, 1}, {kNan, 0}, {8, 2}}, 5 + 6.0 / 3, 1);
  EXPECT_NEAR(history.last().noise, 6, 1e-12);
  EXPECT_TRUE(std::isnan(history.last().rank_norms[1]));
  EXPECT_TRUE(history.last().outliers.empty());
  history.add(2, {{4, 1}, {kNan, 0}}, 4, 2);  // one rank alone gives no estimate
  EXPECT_TRUE(std::isnan(history.last().noise));
  EXPECT_NEAR(history.last().noise_scale, 1.2, 1e-12);  // the earlier estimate
}

TEST(GradientHistory, NegativeSignal_GivesNoNoiseScale) {
  GradientHistory history;
  history.add(1, of({2, 2}), 1.0, 1);  // |G|^2 = 2 * 1 - 4
  EXPECT_EQ(history.last().signal, -2);
  EXPECT_TRUE(std::isnan(history.last().noise_scale));
  history.add(2, of({2, kNan}), kNan, kNan);
  EXPECT_TRUE(std::isnan(history.last().noise));
}

TEST(GradientHistory, Outliers_AreFoundAgainstOthersAndAgainstBefore) {
  for (const size_t ranks : {1, 2, 3, 8, 300}) {
    GradientHistory history;
    std::mt19937 random(static_cast<unsigned>(ranks));
    std::normal_distribution<double> spread(0, 0.1);
    const auto step = [&](double all, size_t who, double more) {
      std::vector<double> norms;
      for (size_t r = 0; r < ranks; ++r)
        norms.push_back(all * std::exp(spread(random)) * (r == who ? more : 1));
      history.add(0, of(norms), 1, 1);
      return history.last().outliers;
    };
    const size_t who = ranks - 1;
    EXPECT_EQ(step(1, who, 1e6), Ids{}) << "in the first steps nothing is known";
    for (int i = 0; i < 2000; ++i) EXPECT_EQ(step(1, who, 1), Ids{}) << i;
    EXPECT_EQ(step(1, who, 20), Ids{static_cast<int64_t>(who)}) << ranks;
    EXPECT_EQ(step(1, who, 0.05), Ids{static_cast<int64_t>(who)}) << ranks;
    if (ranks > 1) {
      EXPECT_EQ(step(1000, who, 1), Ids{}) << "all together";
    }
    for (int i = 0; i < 400; ++i) step(std::exp(-i / 100.0), who, 1);
    EXPECT_EQ(step(std::exp(-4.0), who, 1), Ids{}) << "norms that have fallen slowly";
    EXPECT_EQ(step(1, who, std::numeric_limits<double>::infinity()),
              Ids{static_cast<int64_t>(who)});
    EXPECT_EQ(step(std::exp(-4.0), who, kNan), Ids{static_cast<int64_t>(who)});
    EXPECT_EQ(step(std::exp(-4.0), who, 1), Ids{});
    EXPECT_EQ(history.last().z_scores.size(), ranks);
  }
}

TEST(GradientHistory, RanksThatAreAlike_AreNoOutliersForLittle) {
  GradientHistory history;
  for (int i = 0; i < 100; ++i) {
    history.add(i, of({1, 1, i == 99 ? 1.05 : 1}), 1, 1);
    EXPECT_EQ(history.last().outliers, Ids{}) << i;
  }
  history.add(100, of({0, 0, 0}), 0, 0);  // no gradient at all
  EXPECT_EQ(history.last().outliers, Ids{});
}

}  // namespace
}  // namespace apex::parallel
