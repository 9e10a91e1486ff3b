// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cuda_runtime.h>

namespace apex::testing::cuda {

/// Launches a kernel that a test defines.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(unsigned blocks, unsigned threads, void (*kernel)(Parameters...),
                   Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace apex::testing::cuda
