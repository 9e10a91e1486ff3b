// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime.h>

#include <c10/util/Exception.h>

#include <support/cuda_emulator/cuda_emulator.h>

/// Stand-in for torch's header of this name, on the fake device.

#define C10_CUDA_CHECK(call)                                                                  \
  do {                                                                                        \
    const cudaError_t apex_error = (call);                                                    \
    TORCH_CHECK(apex_error == cudaSuccess, "CUDA error ", static_cast<int>(apex_error), ": ", \
                ::apex::testing::cuda::last_error());                                         \
  } while (false)
