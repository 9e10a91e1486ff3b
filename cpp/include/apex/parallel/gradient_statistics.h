// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <apex/export.h>

/// How large the gradients of the ranks are, and how much they differ. Depends on numbers only, not
/// on the reducer; see Reducer::gradient_statistics().

namespace apex::parallel {

/// Statistics of one synchronized backward, the same on every rank. Norms are Euclidean, over all
/// parameters.
struct GradientStatistics {
  int64_t backward = 0;  ///< number of the backward, from 1; 0: none was measured yet
  double norm = 0;       ///< norm of the reduced gradients; NaN if the step was skipped
  /// By rank: the norm of its gradient before the average, divided by the rank's weight if
  /// weighted. NaN for a rank without data or with weight 0. Leaves out gradients that were reduced
  /// outside the plan.
  std::vector<double> rank_norms;

  /// The gradient noise scale tr(S) / |G|^2, from running averages of both: the batch size up to
  /// which a larger batch needs proportionally fewer steps. The unit is batches of one rank, or
  /// samples (the unit of the weights) if weighted. NaN with one rank, and until a measured step
  /// had a positive estimate of |G|^2.
  ///
  /// Source: S. McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix
  /// A.1. It needs gradients at two batch sizes; here these are one rank's batch and the global
  /// batch.
  double noise_scale = std::numeric_limits<double>::quiet_NaN();
  double noise = 0;   ///< this step's estimate of tr(S), per batch of one rank or per sample
  double signal = 0;  ///< this step's estimate of |G|^2; may be negative

  /// By rank: the z score of the logarithm of its norm, relative to the other ranks in this step or
  /// to all ranks in recent steps, whichever is closer to 0. Standard deviations are estimated from
  /// median deviations, so that outliers do not affect them. 0 in the first 16 steps.
  std::vector<double> z_scores;
  /// Ranks whose norm is not finite, or whose z score is above 10 in absolute value.
  std::vector<int64_t> outliers;
};

/// Norms of one parameter's gradient in the last backward that was measured.
struct ParameterNorms {
  std::string name;
  int64_t bucket = -1;  ///< index in the launch order; -1: reduced outside the plan, or not at all
  double norm = 0;      ///< norm of the reduced gradient
  double own = 0;       ///< norm of this rank's gradient before the average; not divided by its
                        ///< weight
};

}  // namespace apex::parallel
