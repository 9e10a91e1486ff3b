// SPDX-License-Identifier: BSD-3-Clause
// Replaces sync_batch_norm_cuda.cpp in builds without CUDA kernels: CUDA tensors take ATen's
// operators.

#include <torch/library.h>

#include "batch_norm/sync_batch_norm_ops.h"

TORCH_LIBRARY_IMPL(apex, CUDA, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_kernel<&forward_composed>);
  m.impl("sync_batch_norm_backward", &backward_kernel<&backward_composed>);
}
