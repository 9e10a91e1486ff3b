// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cmath>
#include <cstdint>

#include "batch_norm_math.h"

/// CPU kernels of batch norm. They are serial and work on raw pointers to a part of the data. The
/// caller splits the work over threads (planes by channel, rows by row) and does the work per
/// channel.
///
/// Layouts: `planes` is [N, C, S] (channels first), and a kernel processes one channel. `rows` is
/// [R, C] (channels last), and a kernel processes a range of rows. The vectorized code is compiled
/// once per instruction set. `cpu_kernels` picks the widest one that this machine has and that
/// ATEN_CPU_CAPABILITY allows.

namespace apex::kernels {

/// How backward computes the mask of the fused ReLU.
enum class ReluMask {
  kNone,       // no ReLU
  kRecompute,  // from the value before the ReLU, which is recomputed from x
  kOutput,     // from the sign of the output, if z was added before the ReLU
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
// Elements are summed as deviations d = x - s in their compute type (unit roundoff u = 2^-24, or
// 2^-53 for float64) over chunks of bounded size. Sums across lanes and chunks are float64. A lane
// adds at most k terms of a chunk of n values. So (Higham, Accuracy and Stability of Numerical
// Algorithms, section 4.2) the error of sum(d^2) is at most (k+3) u sum(d^2). The error of sum(d)
// is at most (k+1) u sum|d|, and enters the correction sum(d)^2 / n. Both together are at most
//   3 (k+3) u sum(d^2), where sum(d^2) = m2 + n (mean - s)^2.
// The shift s is one of three values: the mean of the chunk, a value for which the code has checked
// that the second term is at most the first, or the mean of earlier values, if these are at least
// n. By Chan's identity the total of these sums is at most twice the total m2. So
//   |error of m2| <= 6 (k+3) u m2,
//   |error of the mean| <= the same factor times the standard deviation,
// as long as k u |mean| is small compared to the standard deviation. After c merges in float64 the
// mean has a further error e <= 2 c 2^-53 |mean|, and m2 has a further error of 2 e sum(n
// |difference of means|). By the Cauchy-Schwarz inequality, the latter is at most m2 * 3 e /
// (standard deviation). Errors of the same sign are common: values of a 16-bit type lie on a coarse
// grid, so the same few squares occur again and again, and each is always rounded the same way.

/// The error bound of Note [Error of the statistics] for the exact variance m2 / n and mean.
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

/// The kernels for one element type T: float, double, at::Half or at::BFloat16. Pointers are to the
/// start of the whole array. `stream` requests non-temporal stores, for results larger than the
/// caches.
template <typename T>
struct CpuKernels {
  using Acc = typename ElementwiseType<T>::type;

  Welford<double> (*planes_statistics)(const T* x, Planes sizes, int64_t channel);
  /// y = normalize(x) [+ z] [then ReLU]; z may be null.
  void (*planes_normalize)(const T* x, const T* z, T* y, Planes sizes, int64_t channel,
                           NormalizeCoefficients<Acc> coefficients, bool relu, bool stream);
  /// Reads `y` only for ReluMask::kOutput. sum_dy_xmu is relative to coefficients.high.
  ReduceResult (*planes_reduce)(const T* dy, const T* x, const T* y, Planes sizes, int64_t channel,
                                NormalizeCoefficients<Acc> coefficients, ReluMask mask);
  /// Writes the masked dy to `dz`, which may be null.
  void (*planes_gradient)(const T* dy, const T* x, const T* y, T* dx, T* dz, Planes sizes,
                          int64_t channel, NormalizeCoefficients<Acc> forward,
                          GradientCoefficients<Acc> backward, ReluMask mask, bool stream);

  /// Merges the statistics of the rows into mean[channels] and m2[channels], the statistics of
  /// `count` earlier rows.
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

/// The instruction set that cpu_kernels() picked: "default", "avx2" or "avx512".
const char* cpu_kernels_name();

}  // namespace apex::kernels
