// SPDX-License-Identifier: BSD-3-Clause
#include "batch_norm_cpu.h"

#include <ATen/Version.h>

#include <string>

#include "batch_norm_cpu_variants.h"

namespace apex::kernels {
namespace {

/// Follows torch's choice, which depends on the processor and on ATEN_CPU_CAPABILITY.
const CpuVariant& chosen_variant() {
  static const CpuVariant& variant = []() -> const CpuVariant& {
#if defined(APEX_CPU_VARIANTS_X86)
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512") {
      return cpu_variant_avx512();
    }
    if (capability == "AVX2") {
      return cpu_variant_avx2();
    }
#endif
    return cpu_variant_default();
  }();
  return variant;
}

}  // namespace

template <>
const CpuKernels<float>& cpu_kernels<float>() {
  return *chosen_variant().float32;
}

template <>
const CpuKernels<double>& cpu_kernels<double>() {
  return *chosen_variant().float64;
}

template <>
const CpuKernels<at::Half>& cpu_kernels<at::Half>() {
  return *chosen_variant().float16;
}

template <>
const CpuKernels<at::BFloat16>& cpu_kernels<at::BFloat16>() {
  return *chosen_variant().bfloat16;
}

const char* cpu_kernels_name() { return chosen_variant().name; }

}  // namespace apex::kernels
