// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

#include "host_device.h"

/// Mergeable mean and sum of squared deviations of a stream of values.
///
/// `update` is Welford's recurrence (B. P. Welford, Technometrics 4(3), 1962); `merge` is the
/// pairwise rule of Chan, Golub and LeVeque ("Algorithms for computing the sample variance",
/// The American Statistician 37(3), 1983, equations 2.1). Neither forms sum(x^2), so a mean that is
/// large compared to the standard deviation costs no digits.
///
/// The kernels do not call `update` per element. They reduce a small chunk (a register tile on the
/// GPU, 16 KiB in the first-level cache on the CPU) by the corrected two-pass formula of the same
/// paper (equation 1.7), which divides once per chunk instead of once per element. Then they merge
/// the chunks with `merge`. Counts are integers in a double, exact up to 2^53.

namespace apex::kernels {

template <typename T>
struct Welford {
  T mean = T(0);
  T m2 = T(0);  // sum of squared deviations from the mean
  T count = T(0);

  APEX_HOST_DEVICE void update(T value) {
    count += T(1);
    const T delta = value - mean;
    mean += delta / count;
    m2 += delta * (value - mean);
  }

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

  APEX_HOST_DEVICE void merge(const Welford& other) { merge(other.mean, other.m2, other.count); }

  /// Merges `n` values, given as sum(x - shift) and sum((x - shift)^2). Accurate if `shift` is
  /// close to the mean of the values (the two-pass correction).
  APEX_HOST_DEVICE void merge_shifted(T shift, T sum, T sum_squares, T n) {
    if (n == T(0)) {
      return;
    }
    const T offset = sum / n;
    const T squares = sum_squares - sum * offset;
    merge(shift + offset, squares > T(0) || squares != squares ? squares : T(0), n);
  }
};

}  // namespace apex::kernels
