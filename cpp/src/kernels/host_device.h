// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Marks functions that the CPU kernels, the CUDA kernels and the host's unit tests share.
#if defined(__CUDACC__)
#define APEX_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Always inlined, because sources of this library are compiled for different instruction sets, and
// the linker keeps only one copy of an inline function that is not inlined.
#define APEX_HOST_DEVICE inline __attribute__((always_inline))
#endif
