// SPDX-License-Identifier: BSD-3-Clause
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <distributed/backends.h>

namespace apex::distributed {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendRequest& request) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout;
  options->group_name = request.group_name;
  options->global_ranks_in_group = request.global_ranks;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, request.rank, request.size,
                                                     std::move(options));
}

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

bool has_completed(c10d::Work& work) {
  // Another thread may be capturing a graph, which a query would invalidate in the default mode.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
  if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess) return true;
  const bool completed = work.isCompleted();
  cudaThreadExchangeStreamCaptureMode(&mode);
  return completed;
}

void require_nccl() {}

}  // namespace apex::distributed
