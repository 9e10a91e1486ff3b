// SPDX-License-Identifier: BSD-3-Clause
// Replaces sync_batch_norm_cuda.cpp in builds without CUDA. A CUDA tensor then causes a clear error
// instead of the dispatcher's list of backends.

#include <torch/library.h>

namespace {

void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK(false, op.operator_name(),
              ": this apex was built without its CUDA kernels, so it does not support CUDA "
              "tensors; reinstall it where nvcc of torch's CUDA version is on PATH "
              "(apex.build_info() says why they were not built).");
}

}  // namespace

TORCH_LIBRARY_IMPL(apex, CUDA, m) {
  for (const char* name : {"sync_batch_norm", "sync_batch_norm_backward", "batch_norm_inference"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}
