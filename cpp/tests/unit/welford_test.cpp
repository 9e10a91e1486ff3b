// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/welford.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/batch_norm_math.h"

namespace apex::kernels {
namespace {

struct Reference {
  double mean;
  double m2;
};

Reference two_pass(const std::vector<double>& values) {
  double mean = 0;
  for (const double v : values) {
    mean += v / static_cast<double>(values.size());
  }
  double m2 = 0;
  for (const double v : values) {
    m2 += (v - mean) * (v - mean);
  }
  return {mean, m2};
}

std::vector<double> random_values(size_t count, double mean) {
  std::mt19937_64 random(std::random_device{}());
  std::normal_distribution<double> normal(mean, 1.0);
  std::vector<double> values(count);
  std::generate(values.begin(), values.end(), [&] { return normal(random); });
  return values;
}

TEST(Welford, Update_LargeMean_MatchesTwoPass) {
  const auto values = random_values(10000, 1e4);
  Welford<double> all;
  for (const double v : values) {
    all.update(v);
  }
  const Reference want = two_pass(values);
  EXPECT_NEAR(all.mean, want.mean, 1e-9);
  EXPECT_NEAR(all.m2 / want.m2, 1.0, 1e-9);
  EXPECT_EQ(all.count, 10000);
}

TEST(Welford, Merge_AnySplit_MatchesTwoPass) {
  const auto values = random_values(1000, -300);
  const Reference want = two_pass(values);
  for (const size_t cut : {size_t{0}, size_t{1}, size_t{499}, size_t{999}, size_t{1000}}) {
    Welford<double> left, right;
    for (size_t i = 0; i < values.size(); ++i) {
      (i < cut ? left : right).update(values[i]);
    }
    left.merge(right);
    EXPECT_NEAR(left.mean, want.mean, 1e-10) << cut;
    EXPECT_NEAR(left.m2 / want.m2, 1.0, 1e-11) << cut;
    EXPECT_EQ(left.count, 1000) << cut;
  }
}

TEST(Welford, Merge_BothEmpty_StaysEmpty) {
  Welford<double> all;
  all.merge(Welford<double>());
  EXPECT_EQ(all.count, 0);
  EXPECT_EQ(all.mean, 0);
  EXPECT_EQ(all.m2, 0);
}

TEST(Welford, MergeShifted_ShiftNearMean_MatchesTwoPass) {
  const auto values = random_values(500, 1e6);
  double sum = 0, squares = 0;
  const double shift = 1e6 + 0.25;
  for (const double v : values) {
    sum += v - shift;
    squares += (v - shift) * (v - shift);
  }
  Welford<double> all;
  all.merge_shifted(shift, sum, squares, 500);
  const Reference want = two_pass(values);
  EXPECT_NEAR(all.mean, want.mean, 1e-8);
  EXPECT_NEAR(all.m2 / want.m2, 1.0, 1e-11);
}

TEST(Welford, MergeShifted_NotANumber_IsKept) {
  Welford<double> all;
  all.merge_shifted(0, NAN, NAN, 3);
  EXPECT_TRUE(std::isnan(all.m2));
}

TEST(BatchNormMath, NormalizeCoefficients_LargeMean_KeepsDigitsBelowFloat) {
  const double mean = 10000.000123, invstd = 0.97, weight = 1.5, bias = -0.25;
  const auto k = normalize_coefficients<float>(mean, invstd, weight, bias);
  for (const float x : {9999.5f, 10000.0f, 10001.75f}) {
    const double want = (static_cast<double>(x) - mean) * invstd * weight + bias;
    EXPECT_NEAR((x - k.high) * k.scale + k.shift, want, 5e-7);
  }
}

TEST(BatchNormMath, GradientCoefficients_MatchDefinition) {
  const double mean = 123.456789, invstd = 2.0, weight = 0.7;
  const double sum_dy = 3.5, sum_dy_xmu = -1.25, count = 64;
  const auto k = gradient_coefficients<double>(mean, invstd, weight, sum_dy, sum_dy_xmu, 1 / count);
  for (const double x : {100.0, 123.0, 140.0}) {
    const double dy = 0.3 * x - 30;
    const double want =
        weight * invstd * (dy - sum_dy / count - (x - mean) * invstd * invstd * sum_dy_xmu / count);
    EXPECT_NEAR(dy * k.dy_scale + (x - k.high) * k.x_scale + k.shift, want, 1e-12);
  }
}

TEST(BatchNormMath, GradientCoefficients_NoCount_StatisticsAreConstants) {
  const auto k = gradient_coefficients<double>(1.0, 2.0, 3.0, 100.0, 100.0, 0.0);
  EXPECT_EQ(k.dy_scale, 6.0);
  EXPECT_EQ(k.x_scale, 0.0);
  EXPECT_EQ(k.shift, 0.0);
}

TEST(BatchNormMath, RunningStatistics_Factor_UsesUnbiasedVariance) {
  const Welford<double> all{2.0, 12.0, 4.0};
  EXPECT_DOUBLE_EQ(update_running_mean(1.0, all, 0.25), 1.25);
  EXPECT_DOUBLE_EQ(update_running_var(1.0, all, 0.25), 0.75 + 0.25 * 4.0);
  EXPECT_DOUBLE_EQ(running_factor(0.1, 7), 0.1);
  EXPECT_DOUBLE_EQ(running_factor(-0.5, 7), -0.5);
}

TEST(BatchNormMath, RunningFactor_NoMomentum_AveragesOverCountedBatches) {
  EXPECT_DOUBLE_EQ(running_factor(kNoMomentum, 4), 0.25);
  EXPECT_EQ(running_factor(kNoMomentum, 0), 0.0);  // no values: nothing changes
}

TEST(BatchNormMath, RunningStatistics_OneValue_ChangeNothing) {
  const Welford<double> all{2.0, 0.0, 1.0};
  EXPECT_EQ(update_running_mean(5.0, all, 0.5), 5.0);
  EXPECT_EQ(update_running_var(5.0, all, 0.5), 5.0);
}

TEST(BatchNormMath, MergeRanks_UnevenAndEmpty_MatchesWhole) {
  const auto values = random_values(700, 50);
  const int64_t channels = 2;
  const size_t cuts[] = {0, 0, 699, 700};  // ranks with 0, 699 and 1 values
  std::vector<double> gathered(3 * statistics_length(channels));
  for (int rank = 0; rank < 3; ++rank) {
    Welford<double> local;
    for (size_t i = cuts[rank]; i < cuts[rank + 1]; ++i) {
      local.update(values[i]);
    }
    double* record = gathered.data() + rank * statistics_length(channels);
    record[1] = local.mean;
    record[channels + 1] = local.m2;
    record[2 * channels] = local.count;
  }
  const Welford<double> all = merge_ranks(gathered.data(), 3, channels, 1);
  const Reference want = two_pass(values);
  EXPECT_NEAR(all.mean, want.mean, 1e-10);
  EXPECT_NEAR(all.m2 / want.m2, 1.0, 1e-11);
  EXPECT_EQ(all.count, 700);
}

TEST(BatchNormMath, MergeRanks_CountsBeyondFloat_AreExact) {
  std::vector<double> gathered{0, 0, 16777216, 0, 0, 1};
  EXPECT_EQ(merge_ranks(gathered.data(), 2, 1, 0).count, 16777217.0);
}

}  // namespace
}  // namespace apex::kernels
