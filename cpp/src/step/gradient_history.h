// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// What follows from the norms of the ranks' gradients, over steps. Pure.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include <apex/parallel/gradient_statistics.h>

namespace apex::parallel {

/// A rank's gradient in one step.
struct RankGradient {
  double squares = 0;  ///< sum of squares of the gradient of the mean over its samples
  double samples = 1;  ///< how many; 0: it has none, and its squares do not count
};

/// Not thread safe.
class GradientHistory {
 public:
  /// @param squares  of the gradient of the mean over all samples; NaN: it was not left.
  /// @param norm     of what was left in its place.
  void add(int64_t backward, const std::vector<RankGradient>& ranks, double squares, double norm);
  const GradientStatistics& last() const { return last_; }

 private:
  void estimate_noise(const std::vector<RankGradient>& ranks, double squares);
  void find_outliers(const std::vector<RankGradient>& ranks);

  GradientStatistics last_;
  double noise_ = 0;  ///< running averages
  double signal_ = 0;
  int64_t estimates_ = 0;
  int64_t steps_ = 0;
  // Of the last steps, by rank and step: logarithms of norms; and how far they were off.
  std::deque<double> levels_;
  std::deque<double> from_others_;
  std::deque<double> from_before_;
};

}  // namespace apex::parallel
