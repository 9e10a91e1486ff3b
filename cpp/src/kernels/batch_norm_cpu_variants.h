// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "batch_norm_cpu.h"

/// The CPU kernels per instruction set. On processors other than x86-64 only the default exists
/// (at::vec uses NEON there).

namespace apex::kernels {

struct CpuVariant {
  const char* name;
  const CpuKernels<float>* float32;
  const CpuKernels<double>* float64;
  const CpuKernels<at::Half>* float16;
  const CpuKernels<at::BFloat16>* bfloat16;
};

const CpuVariant& cpu_variant_default();
#if defined(APEX_CPU_VARIANTS_X86)
const CpuVariant& cpu_variant_avx2();
const CpuVariant& cpu_variant_avx512();
#endif

}  // namespace apex::kernels
