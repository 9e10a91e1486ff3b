// SPDX-License-Identifier: BSD-3-Clause
// The batch-norm operators on CUDA: two launches and at most one collective per direction, all on
// the current stream. The host waits once per device and dtype, when the kernels are compared with
// ATen's.
//
// Note [Counters between blocks]
// Blocks that share a channel use a counter to find out which block is the last. The counter must
// be zero before a launch, and the launch leaves it at zero. Launches on one stream run in order.
// So each stream keeps one zeroed array, and no call clears it. That array is not a tensor, because
// with CUDA graph trees (torch.compile(mode="reduce-overhead")) memory that a call allocates from
// torch's pools must not outlive the call. A CUDA graph may be replayed on any stream, concurrently
// with other work. So during a capture the array is allocated in the graph's own memory, and the
// graph clears it.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <utility>

#include "batch_norm/sync_batch_norm_aten.h"
#include "kernels/batch_norm_cuda.h"

namespace apex::parallel::detail {
namespace {

kernels::DeviceLimits device_limits(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, kernels::DeviceLimits> known;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(device);
  if (found == known.end()) {
    kernels::DeviceLimits limits{};
    C10_CUDA_CHECK(
        cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&limits.threads_per_multiprocessor,
                                          cudaDevAttrMaxThreadsPerMultiProcessor, device));
    found = known.emplace(device, limits).first;
  }
  return found->second;
}

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

/// The counters of the stream, or null if their allocation fails. See Note [Counters between
/// blocks].
unsigned* zeroed_counters(int64_t length, const c10::cuda::CUDAStream& stream) {
  struct Array {
    void* data = nullptr;
    int64_t length = 0;
  };
  static std::mutex mutex;
  // Never freed: the CUDA context may be destroyed before static objects are.
  static auto* owned = new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Array>();
  const std::lock_guard<std::mutex> lock(mutex);
  Array& array = (*owned)[{stream.device_index(), stream.id()}];
  if (array.length < length) {  // launches may still use the shorter array
    const int64_t longer = std::max<int64_t>(length, 4096);
    const size_t bytes = static_cast<size_t>(longer) * sizeof(unsigned);
    void* data = nullptr;
    if (cudaMalloc(&data, bytes) != cudaSuccess) {
      (void)cudaGetLastError();
      return nullptr;
    }
    C10_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, stream.stream()));
    array = {data, longer};
  }
  return static_cast<unsigned*>(array.data);
}

kernels::ElementType element_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernels::ElementType::kFloat32;
    case at::kDouble:
      return kernels::ElementType::kFloat64;
    case at::kHalf:
      return kernels::ElementType::kFloat16;
    case at::kBFloat16:
      return kernels::ElementType::kBFloat16;
    default:
      TORCH_CHECK_TYPE(false, "apex sync batch norm: the input is ", tensor.scalar_type(),
                       "; it takes float16, bfloat16, float32 and float64.");
  }
}

bool is_aligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % kernels::kLoadBytes != 0) {
      return false;
    }
  }
  return true;
}

const void* pointer(const OptionalTensor& tensor) {
  return present(tensor) ? tensor->const_data_ptr() : nullptr;
}

/// A call with the work area of its reducing launch. The tensors keep the memory alive until the
/// launch is enqueued; the allocator reuses memory in stream order.
struct Prepared {
  kernels::CudaCall call;
  at::Tensor partial;
  at::Tensor counters;
};

Prepared prepare(const at::Tensor& x, const Sizes& sizes, bool aligned, bool reduces) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  Prepared p{{element_type(x), sizes.rows, sizes.planes, aligned, device_limits(x.get_device()),
              stream.stream(), nullptr, nullptr},
             {},
             {}};
  if (reduces) {
    p.partial = at::empty({kernels::partial_length(p.call)}, x.options().dtype(at::kDouble));
    p.call.partial = p.partial.mutable_data_ptr<double>();
    const int64_t length = kernels::counters_length(p.call);
    if (!is_capturing()) p.call.counters = zeroed_counters(length, stream);
    if (p.call.counters == nullptr) {
      p.counters = at::zeros({length}, x.options().dtype(at::kInt));
      p.call.counters = reinterpret_cast<unsigned*>(p.counters.mutable_data_ptr<int>());
    }
  }
  return p;
}

void check_launch(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }

ForwardResult forward_by_kernels(const ForwardArguments& args, const ForwardCall& call) {
  const int64_t channels = call.sizes.planes.channels;
  at::Tensor record =
      at::empty({kernels::statistics_length(channels)}, args.input.options().dtype(at::kDouble));
  int64_t* batches = call.counter.defined() ? call.counter.mutable_data_ptr<int64_t>() : nullptr;
  kernels::NormalizeArguments a{};
  a.x = call.x.const_data_ptr();
  a.z = pointer(call.z);
  a.y = call.output.mutable_data_ptr();
  const Prepared prepared = prepare(call.x, call.sizes, is_aligned({a.x, a.z, a.y}), true);
  check_launch(
      kernels::launch_statistics(prepared.call, a.x, record.mutable_data_ptr<double>(), batches));
  const at::Tensor records = call.peers ? gather_statistics(call.peers, record, channels) : record;

  a.weight = channel_param(args.weight);
  a.bias = channel_param(args.bias);
  a.relu = args.fuse_relu;
  a.eps = args.eps;
  a.records = records.const_data_ptr<double>();
  a.ranks = records.numel() / kernels::statistics_length(channels);
  a.momentum = args.momentum.value_or(kernels::kNoMomentum);
  a.num_batches = batches;
  a.running_mean = channel_param(args.running_mean);
  a.running_var = channel_param(args.running_var);
  a.mean = call.mean.mutable_data_ptr<double>();
  a.invstd = call.invstd.mutable_data_ptr<double>();
  a.count = call.count.mutable_data_ptr<int64_t>();
  check_launch(kernels::launch_normalize(prepared.call, a));
  store_counter(args.num_batches_tracked, call.counter);
  return call.results;
}

at::Tensor inference_by_kernels(const InferenceArguments& args, const InferenceCall& call) {
  kernels::NormalizeArguments a{};
  a.x = call.x.const_data_ptr();
  a.z = pointer(call.z);
  a.y = call.output.mutable_data_ptr();
  a.weight = channel_param(args.weight);
  a.bias = channel_param(args.bias);
  a.relu = args.fuse_relu;
  a.eps = args.eps;
  a.running_mean = channel_param(args.running_mean);
  a.running_var = channel_param(args.running_var);
  const bool aligned = is_aligned({a.x, a.z, a.y});
  check_launch(kernels::launch_normalize(prepare(call.x, call.sizes, aligned, false).call, a));
  return call.output;
}

BackwardResult backward_by_kernels(const BackwardArguments& args, const BackwardCall& call) {
  const int64_t channels = call.sizes.planes.channels;
  kernels::GradientArguments a{};
  a.dy = call.dy.const_data_ptr();
  a.x = call.x.const_data_ptr();
  a.y = pointer(call.y);
  a.dx = call.dx.numel() > 0 ? call.dx.mutable_data_ptr() : nullptr;
  a.dz = call.dz.numel() > 0 ? call.dz.mutable_data_ptr() : nullptr;
  a.mask = call.mask;
  a.weight = channel_param(args.weight);
  a.bias = channel_param(args.bias);
  a.statistics = channel_statistics(args.mean, args.invstd_or_var, !call.training, args.eps);
  a.count = call.training ? args.count->const_data_ptr<int64_t>() : nullptr;
  a.dweight = call.weight;
  a.dbias = call.bias;
  const Prepared prepared =
      prepare(call.x, call.sizes, is_aligned({a.dy, a.x, a.y, a.dx, a.dz}), call.reduces);
  at::Tensor sums = at::empty({2 * channels}, args.mean.options().dtype(at::kDouble));
  a.sums = sums.mutable_data_ptr<double>();
  if (call.reduces) {
    check_launch(kernels::launch_reduce(prepared.call, a));
  }
  if (call.peers) {
    all_reduce(call.peers, sums, Direction::kBackward, channels);
  }
  if (a.dx != nullptr || a.dz != nullptr) {
    check_launch(kernels::launch_gradient(prepared.call, a));
  }
  return call.results;
}

const Implementation& implementation(const at::Tensor& x) {
  static const Implementation by_kernels{&forward_by_kernels, &inference_by_kernels,
                                         &backward_by_kernels};
  return choose(by_kernels, x, is_capturing());
}

ForwardResult forward_cuda(const ForwardArguments& args) {
  const ForwardCall call(args);
  const c10::cuda::CUDAGuard guard(args.input.device());
  if (call.sizes.planes.channels == 0) {
    call.count.zero_();
    return call.results;
  }
  return implementation(call.x).forward(args, call);
}

at::Tensor inference_cuda(const InferenceArguments& args) {
  const InferenceCall call(args);
  const c10::cuda::CUDAGuard guard(args.input.device());
  return call.output.numel() == 0 ? call.output : implementation(call.x).inference(args, call);
}

BackwardResult backward_cuda(const BackwardArguments& args) {
  const BackwardCall call(args);
  const c10::cuda::CUDAGuard guard(args.input.device());
  return call.sizes.planes.channels == 0 ? call.results
                                         : implementation(call.x).backward(args, call);
}

}  // namespace
}  // namespace apex::parallel::detail

TORCH_LIBRARY_IMPL(apex, CUDA, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_kernel<&forward_cuda>);
  m.impl("sync_batch_norm_backward", &backward_kernel<&backward_cuda>);
  m.impl("batch_norm_inference", &inference_kernel<&inference_cuda>);
}
