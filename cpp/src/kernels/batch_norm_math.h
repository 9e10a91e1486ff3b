// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "batch_norm_index.h"

/// Per-channel arithmetic of batch norm (S. Ioffe and C. Szegedy, "Batch Normalization", 2015,
/// algorithm 1 and the gradients of section 3), for the CUDA kernels. The arithmetic per channel is
/// float64. The arithmetic per element is float32 (float64 for float64 data).
///
/// Note [The mean in two parts]
/// If the mean were rounded to float32 before it is subtracted, data with mean 1e4 and standard
/// deviation 1 would be off by 5e-4. `high` is the mean rounded to the compute type, so x - high is
/// exact for values near it (Sterbenz). The rest of the mean is folded into another constant, and
/// costs nothing per element.

namespace apex::kernels {

/// Mergeable mean and sum of squared deviations. merge() is the pairwise rule of Chan, Golub and
/// LeVeque ("Algorithms for computing the sample variance", The American Statistician 37(3), 1983,
/// equations 2.1). It does not form sum(x^2), so a mean that is large compared to the standard
/// deviation costs no digits. Counts are integers in a double, exact up to 2^53.
template <typename T>
struct Welford {
  T mean = T(0);
  T m2 = T(0);  // sum of squared deviations from the mean
  T count = T(0);

  /// Merges the statistics of other values. Either side may be empty.
  APEX_HOST_DEVICE void merge(T other_mean, T other_m2, T other_count) {
    if (other_count == T(0)) {
      return;
    }
    const T total = count + other_count;
    const T share = other_count / total;
    const T delta = other_mean - mean;
    mean = count == T(0) ? other_mean : mean + delta * share;
    m2 += other_m2 + (count == T(0) ? T(0) : delta * delta * count * share);
    count = total;
  }
};

/// y = (x - high) * scale + shift.
template <typename T>
struct NormalizeCoefficients {
  T high;
  T scale;
  T shift;

  APEX_HOST_DEVICE T of(T x, T) const { return (x - high) * scale + shift; }
};

template <typename T>
APEX_HOST_DEVICE NormalizeCoefficients<T> normalize_coefficients(double mean, double invstd,
                                                                 double weight, double bias) {
  const T high = static_cast<T>(mean);
  const double low = mean - static_cast<double>(high);
  const double scale = invstd * weight;
  return {high, static_cast<T>(scale), static_cast<T>(bias - low * scale)};
}

/// dx = (dy - dy_mean + (x - high) * slope) * scale. The mean is subtracted from dy before it is
/// scaled: a difference of products would lose digits if the mean is larger than the deviations.
template <typename T>
struct GradientCoefficients {
  T high;
  T dy_mean;
  T slope;
  T scale;

  APEX_HOST_DEVICE T of(T x, T dy) const { return (dy - dy_mean + (x - high) * slope) * scale; }
};

/// `sum_dy` and `sum_dy_xmu` (sum of dy * (x - mean)) are over all ranks. `inverse_count` is 1 over
/// the number of values.
template <typename T>
APEX_HOST_DEVICE GradientCoefficients<T> gradient_coefficients(double mean, double invstd,
                                                               double weight, double sum_dy,
                                                               double sum_dy_xmu,
                                                               double inverse_count) {
  const T high = static_cast<T>(mean);
  const double low = mean - static_cast<double>(high);
  const double slope = -invstd * invstd * sum_dy_xmu * inverse_count;
  const double dy_mean = sum_dy * inverse_count + slope * low;
  return {high, static_cast<T>(dy_mean), static_cast<T>(slope), static_cast<T>(weight * invstd)};
}

/// The value for momentum=None, which makes the running statistics a cumulative average. It is NaN
/// because torch accepts any number, even a negative one.
constexpr double kNoMomentum = std::numeric_limits<double>::quiet_NaN();

/// The weight of the newest batch in the running statistics. For a cumulative average it is 1 /
/// `batches`, which includes this batch. If batches are not counted (zero), the running statistics
/// keep their values, as in torch.
APEX_HOST_DEVICE double running_factor(double momentum, int64_t batches) {
  if (momentum == momentum) {
    return momentum;
  }
  return batches > 0 ? 1.0 / static_cast<double>(batches) : 0.0;
}

/// The running variance is unbiased. With fewer than two values neither running statistic changes.
APEX_HOST_DEVICE double update_running_mean(double running, const Welford<double>& all,
                                            double factor) {
  return all.count > 1 ? (1 - factor) * running + factor * all.mean : running;
}

APEX_HOST_DEVICE double update_running_var(double running, const Welford<double>& all,
                                           double factor) {
  return all.count > 1 ? (1 - factor) * running + factor * (all.m2 / (all.count - 1)) : running;
}

/// The length of the record that the ranks exchange in forward, in float64: mean[channels],
/// m2[channels], count.
APEX_HOST_DEVICE int64_t statistics_length(int64_t channels) { return 2 * channels + 1; }

}  // namespace apex::kernels
