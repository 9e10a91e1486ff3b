// SPDX-License-Identifier: BSD-3-Clause
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <distributed/backends.h>

namespace apex::distributed {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendRequest& request) {
  auto options = c10d::ProcessGroupNCCL::Options::create(request.nccl.high_priority_stream());
  if (request.nccl.min_ctas()) options->config.minCTAs = *request.nccl.min_ctas();
  if (request.nccl.max_ctas()) options->config.maxCTAs = *request.nccl.max_ctas();
  options->timeout = request.timeout;
  options->group_name = request.group_name;
  options->global_ranks_in_group = request.global_ranks;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, request.rank, request.size,
                                                     std::move(options));
}

namespace {

class Event final : public StreamMark {
 public:
  bool set() override {
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None)
      return false;
    event_.record();
    return true;
  }
  bool reached() override {
    // Another thread may be capturing a graph.
    const c10::cuda::CUDAStreamCaptureModeGuard guard(cudaStreamCaptureModeThreadLocal);
    return event_.query();
  }

 private:
  at::cuda::CUDAEvent event_{cudaEventDisableTiming};
};

}  // namespace

std::unique_ptr<StreamMark> make_stream_mark() { return std::make_unique<Event>(); }

void require_nccl() {}

int visible_gpus() { return c10::cuda::device_count(); }

void use_gpu(int index) { c10::cuda::set_device(static_cast<c10::DeviceIndex>(index)); }

}  // namespace apex::distributed
