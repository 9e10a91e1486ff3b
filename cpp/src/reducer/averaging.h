// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// The factors by which gradients are multiplied before and after their sum. Pure.

// Note [Averages in low precision]
//
// - NCCL's AVG multiplies by 1/N before it sums, and rounds 1/N and the product to the dtype. In
//   bfloat16 that is exact if N is a power of two. For another N all averages are off by the
//   rounding of 1/N, up to 0.4 %. In float16 a value below 2^-14 N (0.06 at 1,024 ranks) becomes
//   subnormal. In float32 and float64 the error is that of one rounding.
// - A division before the sum has the same errors. So does a division after the sum that rounds 1/N
//   to the dtype: see scale_in_place().
//
// So where the collective does not divide well, gradients are summed first and divided afterwards,
// as in NVIDIA's Apex. A float16 sum may then overflow although the average would not, above
// 65,504 / N. The result is an infinity on every rank, and a dynamic loss scaler reduces its scale.
// Gradients that underflow would not be detected. gradient_predivide_factor moves a part of the
// division before the sum, and allreduce_always_fp32 sums in float32.

#include <cmath>
#include <cstdint>

#include <c10/core/ScalarType.h>

#include <apex/parallel/reducer.h>

#include "reducer/reduction.h"

namespace apex::parallel::detail {

struct Averaging {
  double before = 1.0;  ///< gradients are multiplied by this before they are sent
  double after = 1.0;   ///< and by this when they are unpacked
};

/// Whether NCCL's AVG rounds no more than a division: see Note [Averages in low precision].
inline bool nccl_averages_well(at::ScalarType dtype, int64_t world_size) {
  const bool power_of_two = (world_size & (world_size - 1)) == 0;
  return dtype == at::kFloat || dtype == at::kDouble || (dtype == at::kBFloat16 && power_of_two);
}

/// The factors for a bucket. The collective divides if it can and rounds well; otherwise the sum is
/// divided, see Note [Averages in low precision].
/// @param divisor     number of ranks to divide by. Under join() it may exclude ranks without data,
///                    and is known after the sum.
/// @param world_size  number of ranks by which a reduction that averages divides.
/// @param total_weight  of all ranks, with the option weighted: see Note [Weighted means].
inline Averaging averaging_of(const ReducerOptions& options, const ReductionTraits& traits,
                              at::ScalarType dtype, int64_t divisor, int64_t world_size,
                              double total_weight = 0) {
  if (options.weighted) {
    const double after = total_weight == 0 ? 0.0 : 1.0 / total_weight;
    if (traits.averages) return {1.0, after * static_cast<double>(world_size)};
    if (dtype == at::kFloat || dtype == at::kDouble) return {1.0, after};
    const double scale = std::exp2(std::ceil(std::log2(world_size)));
    return {1.0 / scale, after * scale};
  }
  const auto ranks = static_cast<double>(divisor);
  if (traits.averages) {
    return {1.0, options.gradient_average ? static_cast<double>(world_size) / ranks : 1.0};
  }
  const double factor = options.gradient_predivide_factor;
  return {1.0 / factor, options.gradient_average ? factor / ranks : 1.0};
}

}  // namespace apex::parallel::detail
