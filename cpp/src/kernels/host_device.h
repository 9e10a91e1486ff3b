// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// Marks functions that the CUDA kernels share with the host and its unit tests.
#if defined(__CUDACC__)
#define APEX_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define APEX_HOST_DEVICE inline
#endif
