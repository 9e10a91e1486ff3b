// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <apex/export.h>

/// How large the gradients of the ranks are, and how much they differ. A leaf: it knows numbers,
/// not the reducer; see Reducer::gradient_statistics().

namespace apex::parallel {

/// Of one synchronized backward, the same on every rank. Norms are Euclidean, over all parameters.
struct GradientStatistics {
  int64_t backward = 0;  ///< its number, from 1; 0: none was measured yet
  double norm = 0;       ///< of the gradients that it left; NaN if the step was skipped
  /// By rank: of its gradient before the average; with weights, divided by the rank's weight. NaN
  /// for a rank without data, or of weight 0. Without gradients that were reduced apart from the
  /// plan.
  std::vector<double> rank_norms;

  /// The gradient noise scale tr(S) / |G|^2, by running averages of both: the batch size up to
  /// which a larger batch needs proportionally fewer steps. In batches of one rank; with weights,
  /// in samples (what the weights count). NaN with one rank, and until steps have been measured
  /// whose estimate of |G|^2 is positive.
  ///
  /// Source: S. McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix
  /// A.1: of gradients of two batch sizes, here those of each rank and of all.
  double noise_scale = std::numeric_limits<double>::quiet_NaN();
  double noise = 0;   ///< this step's estimate of tr(S), per batch of one rank, or sample
  double signal = 0;  ///< this step's estimate of |G|^2; may be negative

  /// By rank: by how many standard deviations the logarithm of its norm is off, both from the other
  /// ranks' in this step and from all ranks' in the last ones, whichever is less. Deviations are
  /// estimated by their median, so that outliers do not count. 0 in the first 16 steps.
  std::vector<double> z_scores;
  /// Ranks whose norm is not finite, or whose z score is more than 10 away from 0.
  std::vector<int64_t> outliers;
};

/// Of one parameter, in the last backward that was measured.
struct ParameterNorms {
  std::string name;
  int64_t bucket = -1;  ///< in the launch order; -1: reduced apart from the plan, or not at all
  double norm = 0;      ///< of the gradient that was left
  double own = 0;       ///< of this rank's, before the average; not divided by its weight
};

}  // namespace apex::parallel
