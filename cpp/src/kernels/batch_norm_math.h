// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "host_device.h"
#include "welford.h"

/// Per-channel arithmetic of batch norm (S. Ioffe and C. Szegedy, "Batch Normalization", 2015,
/// algorithm 1 and the gradients of section 3), shared by the CPU and the CUDA kernels. Everything
/// that happens once per channel is done in float64; elements are handled in float32 (float64 for
/// float64 data) by one subtraction and one or two fused multiply-adds.
///
/// Note [The mean in two parts]
/// Data with mean 1e4 and deviation 1 would lose 5e-4 of its deviation if the mean were rounded to
/// float32 before it is subtracted. `high` is the mean rounded to the element's type, so that
/// x - high is exact for neighbouring values (Sterbenz), and the rest of the mean is folded into
/// the additive constant: it costs nothing per element.

namespace apex::kernels {

/// y = (x - high) * scale + shift.
template <typename T>
struct NormalizeCoefficients {
  T high;
  T scale;
  T shift;
};

template <typename T>
APEX_HOST_DEVICE NormalizeCoefficients<T> normalize_coefficients(double mean, double invstd,
                                                                 double weight, double bias) {
  const T high = static_cast<T>(mean);
  const double low = mean - static_cast<double>(high);
  const double scale = invstd * weight;
  return {high, static_cast<T>(scale), static_cast<T>(bias - low * scale)};
}

/// dx = dy * dy_scale + (x - high) * x_scale + shift.
template <typename T>
struct GradientCoefficients {
  T high;
  T dy_scale;
  T x_scale;
  T shift;
};

/// `sum_dy` and `sum_dy_xmu` (sum of dy * (x - mean)) are over all ranks; `inverse_count` is 1 over
/// the number of values, or zero if the statistics were constants (evaluation), whose gradient has
/// no such terms.
template <typename T>
APEX_HOST_DEVICE GradientCoefficients<T> gradient_coefficients(double mean, double invstd,
                                                               double weight, double sum_dy,
                                                               double sum_dy_xmu,
                                                               double inverse_count) {
  const T high = static_cast<T>(mean);
  const double low = mean - static_cast<double>(high);
  const double dy_scale = weight * invstd;
  const double x_scale = -dy_scale * invstd * invstd * sum_dy_xmu * inverse_count;
  const double shift = -dy_scale * sum_dy * inverse_count - x_scale * low;
  return {high, static_cast<T>(dy_scale), static_cast<T>(x_scale), static_cast<T>(shift)};
}

APEX_HOST_DEVICE double inverse_deviation(const Welford<double>& all, double eps) {
  return 1.0 / sqrt((all.count > 0 ? all.m2 / all.count : 0.0) + eps);
}

/// What momentum is where there is none: the running statistics are a cumulative average. Not a
/// number, as torch takes any number, a negative one too.
constexpr double kNoMomentum = std::numeric_limits<double>::quiet_NaN();

/// The weight of the newest batch in the running statistics. In a cumulative average it follows
/// from `batches`, which counts this batch, too; where nobody counts (zero) the running statistics
/// keep their values, as torch's do.
APEX_HOST_DEVICE double running_factor(double momentum, int64_t batches) {
  if (momentum == momentum) {
    return momentum;
  }
  return batches > 0 ? 1.0 / static_cast<double>(batches) : 0.0;
}

/// The running variance is the unbiased one. Nothing changes where no unbiased variance exists.
APEX_HOST_DEVICE double update_running_mean(double running, const Welford<double>& all,
                                            double factor) {
  return all.count > 1 ? (1 - factor) * running + factor * all.mean : running;
}

APEX_HOST_DEVICE double update_running_var(double running, const Welford<double>& all,
                                           double factor) {
  return all.count > 1 ? (1 - factor) * running + factor * (all.m2 / (all.count - 1)) : running;
}

/// What the ranks exchange in the forward pass, in float64: mean[channels], m2[channels], count.
APEX_HOST_DEVICE int64_t statistics_length(int64_t channels) { return 2 * channels + 1; }

/// One channel's statistics over all ranks; `gathered` holds `ranks` such records.
APEX_HOST_DEVICE Welford<double> merge_ranks(const double* gathered, int64_t ranks,
                                             int64_t channels, int64_t channel) {
  Welford<double> all;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const double* record = gathered + rank * statistics_length(channels);
    all.merge(record[channel], record[channels + channel], record[2 * channels]);
  }
  return all;
}

}  // namespace apex::kernels
