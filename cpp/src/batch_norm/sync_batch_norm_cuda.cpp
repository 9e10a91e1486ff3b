// SPDX-License-Identifier: BSD-3-Clause
// The batch-norm operators on CUDA: at most three launches and one collective per direction, all on
// the current stream. The host never waits.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>

#include "batch_norm/sync_batch_norm_ops.h"
#include "kernels/batch_norm_cuda.h"

namespace apex::parallel::detail {
namespace {

kernels::DeviceLimits device_limits(c10::DeviceIndex device) {
  kernels::DeviceLimits limits{};
  C10_CUDA_CHECK(
      cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&limits.threads_per_multiprocessor,
                                        cudaDevAttrMaxThreadsPerMultiProcessor, device));
  return limits;
}

bool is_aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(), [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kernels::kLoadBytes == 0;
  });
}

/// A tensor [C] as the kernels take it: contiguous, float32 or float64.
class Channels {
 public:
  explicit Channels(const OptionalTensor& given) {
    if (!present(given)) return;
    tensor_ =
        given->to(given->scalar_type() == at::kDouble ? at::kDouble : at::kFloat).contiguous();
  }

  kernels::ChannelArray array() const {
    if (!tensor_.defined() || tensor_.numel() == 0) return {};
    if (tensor_.scalar_type() == at::kDouble) return {nullptr, tensor_.mutable_data_ptr<double>()};
    return {tensor_.mutable_data_ptr<float>(), nullptr};
  }
  /// Copies what a kernel has written back.
  void update(const OptionalTensor& given) const {
    if (tensor_.defined() && !tensor_.is_same(*given)) given->copy_(tensor_, /*non_blocking=*/true);
  }

 private:
  at::Tensor tensor_;
};

/// A call with the work area of its reducing launch. The tensor keeps the memory alive until the
/// launches are enqueued; the allocator reuses memory in stream order.
struct Prepared {
  kernels::CudaCall call;
  at::Tensor partial;
};

Prepared prepare(const at::Tensor& x, const Sizes& sizes, bool aligned) {
  Prepared p{{x.scalar_type(), sizes.rows, sizes.planes, aligned, device_limits(x.get_device()),
              c10::cuda::getCurrentCUDAStream().stream(), nullptr},
             {}};
  p.partial = at::empty({kernels::partial_length(p.call)}, x.options().dtype(at::kDouble));
  p.call.partial = p.partial.mutable_data_ptr<double>();
  return p;
}

void check_launch(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }

ForwardResult forward_cuda(const ForwardArguments& args) {
  const Peers peers = checked_peers(args);
  const c10::cuda::CUDAGuard guard(args.input.device());
  const at::Tensor x = in_layout(args.input), y = at::empty_like(x);
  const Sizes sizes(x);
  const int64_t channels = sizes.planes.channels;
  const auto float64 = x.options().dtype(at::kDouble);
  const at::Tensor mean = at::empty({channels}, float64), invstd = at::empty({channels}, float64),
                   count = at::empty({1}, x.options().dtype(at::kLong));
  if (channels == 0) {
    count.zero_();
    return {y, mean, invstd, count};
  }
  // The kernels count in an int64.
  const OptionalTensor& counted = args.num_batches_tracked;
  const at::Tensor counter = present(counted) ? counted->to(at::kLong) : at::Tensor();
  int64_t* const batches = counter.defined() ? counter.mutable_data_ptr<int64_t>() : nullptr;
  const Prepared prepared = prepare(x, sizes, is_aligned({x.const_data_ptr(), y.const_data_ptr()}));
  at::Tensor records = at::empty({kernels::statistics_length(channels)}, float64);
  check_launch(kernels::launch_statistics(prepared.call, x.const_data_ptr(),
                                          records.mutable_data_ptr<double>(), batches));
  if (peers) records = all_gather(peers, records, Direction::kForward, channels);

  const Channels weight(args.weight), bias(args.bias), running_mean(args.running_mean),
      running_var(args.running_var);
  kernels::NormalizeArguments a{};
  a.x = x.const_data_ptr();
  a.out = y.mutable_data_ptr();
  a.weight = weight.array();
  a.bias = bias.array();
  a.eps = args.eps;
  a.records = records.const_data_ptr<double>();
  a.ranks = records.numel() / kernels::statistics_length(channels);
  a.momentum = args.momentum.value_or(kernels::kNoMomentum);
  a.num_batches = batches;
  a.running_mean = running_mean.array();
  a.running_var = running_var.array();
  a.mean = mean.mutable_data_ptr<double>();
  a.invstd = invstd.mutable_data_ptr<double>();
  a.count = count.mutable_data_ptr<int64_t>();
  check_launch(kernels::launch_normalize(prepared.call, a));
  running_mean.update(args.running_mean);
  running_var.update(args.running_var);
  if (counter.defined() && !counter.is_same(*counted)) {
    counted->copy_(counter.view(counted->sizes()), /*non_blocking=*/true);
  }
  return {y, mean, invstd, count};
}

BackwardResult backward_cuda(const BackwardArguments& args) {
  const Peers peers = checked_peers(args);
  const c10::cuda::CUDAGuard guard(args.input.device());
  const at::Tensor x = in_layout(args.input);
  const at::Tensor dy = in_layout_of(x, args.grad_output.to(x.scalar_type()));
  const Sizes sizes(x);
  const int64_t channels = sizes.planes.channels;
  const at::Tensor mean = args.mean.to(at::kDouble).contiguous(),
                   invstd = args.invstd.to(at::kDouble).contiguous();
  const at::Tensor dx = args.needs[0] ? at::empty_like(x) : at::empty({0}, x.options());
  const auto parameter = [&](bool needed) {
    return at::empty({needed ? channels : 0}, parameter_options(args));
  };
  const BackwardResult results{dx, parameter(args.needs[1]), parameter(args.needs[2])};
  if (channels == 0) return results;
  at::Tensor sums = at::empty({2 * channels}, mean.options());
  const Channels weight(args.weight), dweight(std::get<1>(results)), dbias(std::get<2>(results));
  kernels::GradientArguments a{};
  a.dy = dy.const_data_ptr();
  a.x = x.const_data_ptr();
  a.out = dx.mutable_data_ptr();
  a.weight = weight.array();
  a.mean = mean.const_data_ptr<double>();
  a.invstd = invstd.const_data_ptr<double>();
  a.count = args.count.const_data_ptr<int64_t>();
  a.sums = sums.mutable_data_ptr<double>();
  a.dweight = dweight.array();
  a.dbias = dbias.array();
  const Prepared prepared = prepare(x, sizes, is_aligned({a.dy, a.x, a.out}));
  check_launch(kernels::launch_reduce(prepared.call, a));
  dweight.update(std::get<1>(results));
  dbias.update(std::get<2>(results));
  if (!args.needs[0]) return results;
  if (peers) all_reduce(peers, sums, Direction::kBackward, channels);
  check_launch(kernels::launch_gradient(prepared.call, a));
  return results;
}

}  // namespace
}  // namespace apex::parallel::detail

TORCH_LIBRARY_IMPL(apex, CUDA, m) {
  using namespace apex::parallel::detail;
  m.impl("sync_batch_norm", &forward_kernel<&forward_cuda>);
  m.impl("sync_batch_norm_backward", &backward_kernel<&backward_cuda>);
}
