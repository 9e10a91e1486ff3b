// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Statistics of the norms of the ranks' gradients over steps: noise scale and outliers. Pure.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include <apex/parallel/gradient_statistics.h>

namespace apex::parallel {

/// A rank's gradient in one step.
struct RankGradient {
  double squares = 0;  ///< sum of squares of the gradient of the mean over the rank's samples
  double samples = 1;  ///< number of samples; if 0, `squares` is ignored
};

/// Computes GradientStatistics from the gradients of one step after another. Not thread safe.
class GradientHistory {
 public:
  /// @param squares  of the gradient of the mean over all samples; NaN if it was not computed.
  /// @param norm     of the reduced gradients.
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
  // By rank and step, of the last steps: logarithms of norms, and their deviations from the other
  // ranks and from earlier steps.
  std::deque<double> levels_;
  std::deque<double> from_others_;
  std::deque<double> from_before_;
};

}  // namespace apex::parallel
