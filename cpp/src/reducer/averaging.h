// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Where the division by the number of ranks takes place. Pure.

#include <cstdint>

#include <c10/core/ScalarType.h>

#include <apex/parallel/reducer.h>

#include "reducer/reduction.h"

namespace apex::parallel::detail {

struct Averaging {
  double before = 1.0;  ///< gradients are multiplied by this while they are packed
  double after = 1.0;   ///< and by this when they are unpacked
};

/// The division rides on a pass that is made anyway: on the collective where that divides, else on
/// the copy into the bucket. float16 and bfloat16 are divided after the sum, as Apex does: dividing
/// first would push small gradients below their smallest number.
/// @param divisor     by how many ranks the sum is divided: under join() perhaps those that have
/// data.
/// @param world_size  by how many a reduction that averages divides.
inline Averaging averaging_of(const ReducerOptions& options, const ReductionTraits& traits,
                              at::ScalarType dtype, int64_t divisor, int64_t world_size) {
  const auto ranks = static_cast<double>(divisor);
  if (traits.averages) {
    return {1.0, options.gradient_average ? static_cast<double>(world_size) / ranks : 1.0};
  }
  const bool divides_first = options.gradient_average && options.gradient_predivide_factor == 1.0 &&
                             (dtype == at::kFloat || dtype == at::kDouble);
  if (divides_first) return {1.0 / ranks, 1.0};
  const double factor = options.gradient_predivide_factor;
  return {1.0 / factor, options.gradient_average ? factor / ranks : 1.0};
}

}  // namespace apex::parallel::detail
