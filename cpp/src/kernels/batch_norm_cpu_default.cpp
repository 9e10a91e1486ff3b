// SPDX-License-Identifier: BSD-3-Clause
// The CPU kernels for one instruction set. The build sets the compiler flags of this file; at::vec
// requires the two macros.
#define CPU_CAPABILITY DEFAULT
#define CPU_CAPABILITY_DEFAULT
#define APEX_CPU_VARIANT cpu_default

#include "batch_norm_cpu_rows.h"
#include "batch_norm_cpu_variants.h"

namespace apex::kernels {

const CpuVariant& cpu_variant_default() {
  static const CpuVariant variant{
      "default", &kernels_of_this_variant<float>(), &kernels_of_this_variant<double>(),
      &kernels_of_this_variant<at::Half>(), &kernels_of_this_variant<at::BFloat16>()};
  return variant;
}

}  // namespace apex::kernels
