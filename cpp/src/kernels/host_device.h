// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Marks arithmetic that the CPU kernels, the CUDA kernels and the host's unit tests share.
#if defined(__CUDACC__)
#define APEX_HOST_DEVICE __host__ __device__ __forceinline__
#else
// Always inlined: the sources of one library are compiled for several instruction sets, and the
// linker keeps only one copy of an inline function that was not.
#define APEX_HOST_DEVICE inline __attribute__((always_inline))
#endif
