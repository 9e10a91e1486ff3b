// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>

#include "batch_norm_math.h"

/// Batch norm on the CPU: serial kernels over a part of the data, on raw pointers. The caller
/// splits the work over threads (planes: by channel; rows: by row) and does what is per channel.
///
/// Two layouts: `planes` is [N, C, S] (channels first), one channel at a time; `rows` is [R, C]
/// (channels last), a range of rows at a time. The vectorized code is compiled once per instruction
/// set, and `cpu_kernels` picks the widest that this machine has and that torch was allowed to use
/// (ATEN_CPU_CAPABILITY is honoured).

namespace apex::kernels {

/// How the gradient passes the fused ReLU.
enum class ReluMask {
  kNone,       // no ReLU
  kRecompute,  // the value before the ReLU follows from x alone
  kOutput,     // something was added before the ReLU: its sign is that of the output
};

/// Sizes of the channels-first layout.
struct Planes {
  int64_t batch;
  int64_t channels;
  int64_t plane;
};

struct ReduceResult {
  double sum_dy;
  double sum_dy_xmu;
};

// Note [Error of the statistics]
// Elements are summed as deviations d = x - s in their type of computation (unit roundoff u =
// 2^-24, or 2^-53 for float64) over chunks of a bounded size; everything across lanes and chunks is
// float64. A lane adds up at most k terms of a chunk of n values, so (Higham, Accuracy and
// Stability of Numerical Algorithms, section 4.2) sum(d^2) is off by at most (k+3) u sum(d^2), and
// sum(d) by (k+1) u sum|d|, which enters the correction sum(d)^2 / n: together 3 (k+3) u sum(d^2).
// And sum(d^2) = m2 + n (mean - s)^2, where s is the chunk's own mean, or a value for which the
// second term was seen to be no more than the first, or, once at least n values have been merged,
// their mean: by Chan's identity these sums are together at most twice the whole m2. So
//   |error of m2| <= 6 (k+3) u m2,  |error of the mean| <= the same factor times the deviation,
// as long as k u |mean| is small against the deviation. c merges add what float64 can say of the
// mean: it is off by e <= 2 c 2^-53 |mean|, and m2 by 2 e sum(n |difference of means|), which by
// Cauchy and Schwarz is at most 3 e / deviation of it. Errors of one sign are common: values of a
// 16-bit type lie on a coarse grid, the same few squares occur again and again, and each is always
// rounded the same way.

/// The bound of Note [Error of the statistics] for m2 / n as a variance and |mean|, both exact.
inline double variance_error(int64_t additions, double unit_roundoff, int64_t merges,
                             double variance, double mean) {
  return 6.0 * static_cast<double>(additions + 3) * unit_roundoff * variance +
         6.0 * static_cast<double>(merges) * 0x1p-53 * mean * std::sqrt(variance);
}

template <typename T>
struct ElementwiseType {
  using type = float;
};
template <>
struct ElementwiseType<double> {
  using type = double;
};

/// T: float, double, at::Half, at::BFloat16. Pointers are to the start of the whole array. `stream`
/// asks for results to be written past the caches, for those that are larger.
template <typename T>
struct CpuKernels {
  using Acc = typename ElementwiseType<T>::type;

  Welford<double> (*planes_statistics)(const T* x, Planes sizes, int64_t channel);
  /// y = normalize(x) [+ z] [then ReLU]; z may be null.
  void (*planes_normalize)(const T* x, const T* z, T* y, Planes sizes, int64_t channel,
                           NormalizeCoefficients<Acc> coefficients, bool relu, bool stream);
  /// `y` is read for ReluMask::kOutput only. sum_dy_xmu is relative to coefficients.high.
  ReduceResult (*planes_reduce)(const T* dy, const T* x, const T* y, Planes sizes, int64_t channel,
                                NormalizeCoefficients<Acc> coefficients, ReluMask mask);
  /// `dz` (may be null) gets the masked dy.
  void (*planes_gradient)(const T* dy, const T* x, const T* y, T* dx, T* dz, Planes sizes,
                          int64_t channel, NormalizeCoefficients<Acc> forward,
                          GradientCoefficients<Acc> backward, ReluMask mask, bool stream);

  /// Merges the rows' statistics into mean[channels] and m2[channels], which summarize `count`
  /// rows.
  void (*rows_statistics)(const T* x, int64_t begin, int64_t end, int64_t channels, double* mean,
                          double* m2, int64_t count);
  /// Coefficients are arrays of one entry per channel: high, scale, shift.
  void (*rows_normalize)(const T* x, const T* z, T* y, int64_t begin, int64_t end, int64_t channels,
                         const Acc* high, const Acc* scale, const Acc* shift, bool relu,
                         bool stream);
  /// Adds to sum_dy[channels] and sum_dy_xmu[channels] (relative to high).
  void (*rows_reduce)(const T* dy, const T* x, const T* y, int64_t begin, int64_t end,
                      int64_t channels, const Acc* high, const Acc* scale, const Acc* shift,
                      ReluMask mask, double* sum_dy, double* sum_dy_xmu);
  /// `forward` is {high, scale, shift}, `backward` {dy_scale, x_scale, shift}.
  void (*rows_gradient)(const T* dy, const T* x, const T* y, T* dx, T* dz, int64_t begin,
                        int64_t end, int64_t channels, const Acc* const forward[3],
                        const Acc* const backward[3], ReluMask mask, bool stream);
};

/// The kernels for this machine. Thread safe.
template <typename T>
const CpuKernels<T>& cpu_kernels();

/// "default", "avx2" or "avx512": what cpu_kernels() picked.
const char* cpu_kernels_name();

}  // namespace apex::kernels
