// The batch-norm operators on CUDA: two launches and at most one collective per direction, all on
// the current stream; the host never waits.
//
// Note [Counters between blocks]
// Blocks that share a channel find out which of them is last by a counter that has to be zero
// before the launch and is zero again after it. Launches on one stream follow each other, so that
// each stream owns one zeroed array for good and nothing has to be cleared per call. A CUDA graph
// may be replayed on any stream, beside anything: while capturing, the array is allocated in the
// graph's own memory and cleared by the graph.

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

#include "batch_norm/sync_batch_norm_common.h"
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

/// See Note [Counters between blocks].
at::Tensor zeroed_counters(int64_t length, const at::Tensor& like,
                           const c10::cuda::CUDAStream& stream) {
  const auto options = like.options().dtype(at::kInt);
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return at::zeros({length}, options);
  }
  static std::mutex mutex;
  // Never destroyed: the CUDA context may be gone before static objects are.
  static auto* owned = new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, at::Tensor>();
  const std::lock_guard<std::mutex> lock(mutex);
  at::Tensor& counters = (*owned)[{stream.device_index(), stream.id()}];
  if (!counters.defined() || counters.numel() < length) {
    counters = at::zeros({std::max<int64_t>(length, 4096)}, options);
  }
  return counters;
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

bool is_present(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

bool is_aligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % kernels::kLoadBytes != 0) {
      return false;
    }
  }
  return true;
}

const void* pointer(const OptionalTensor& tensor) {
  return is_present(tensor) ? tensor->const_data_ptr() : nullptr;
}

/// A call with the work area that its reducing launch needs; the tensors keep the memory alive
/// until the launch is on the stream (the allocator orders its reuse behind it).
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
    p.counters = zeroed_counters(kernels::counters_length(p.call), x, stream);
    p.call.partial = p.partial.mutable_data_ptr<double>();
    p.call.counters = reinterpret_cast<unsigned*>(p.counters.mutable_data_ptr<int>());
  }
  return p;
}

void check_launch(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }

OptionalTensor optional_to_layout(const OptionalTensor& tensor, MemoryLayout layout) {
  return is_present(tensor) ? OptionalTensor(to_layout(*tensor, layout)) : std::nullopt;
}

ForwardResult forward_cuda(const at::Tensor& input, const OptionalTensor& z,
                           const OptionalTensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& running_mean, const OptionalTensor& running_var,
                           const OptionalTensor& num_batches_tracked,
                           std::optional<double> momentum, double eps, bool channel_last,
                           bool fuse_relu, c10::string_view group_name) {
  const Peers peers = find_peers(group_name);
  {
    const BeforeExchange checking(peers, Direction::kForward);
    check_forward(input, z, weight, bias, running_mean, running_var, num_batches_tracked,
                  channel_last);
    check_updated(running_mean, running_var);
  }
  const c10::cuda::CUDAGuard guard(input.device());
  const MemoryLayout layout = layout_of(input, channel_last);
  const at::Tensor x = to_layout(input, layout);
  const OptionalTensor added = optional_to_layout(z, layout);
  const Sizes sizes = sizes_of(x, layout);
  const int64_t channels = sizes.planes.channels;
  if (!peers) {
    check_more_than_one_value(input, sizes.values_per_channel());
  }
  const auto float64 = input.options().dtype(at::kDouble);
  at::Tensor output = empty_in_layout(x, layout);
  at::Tensor mean = at::empty({channels}, float64);
  at::Tensor invstd = at::empty({channels}, float64);
  at::Tensor count = at::empty({1}, input.options().dtype(at::kLong));
  if (channels == 0) {
    return {output, mean, invstd, count.zero_()};
  }

  at::Tensor record = at::empty({kernels::statistics_length(channels)}, float64);
  const at::Tensor counter = counter_as_int64(num_batches_tracked);
  int64_t* batches = counter.defined() ? counter.mutable_data_ptr<int64_t>() : nullptr;
  const bool aligned = is_aligned({x.const_data_ptr(), pointer(added), output.const_data_ptr()});
  const Prepared prepared = prepare(x, sizes, aligned, true);
  check_launch(kernels::launch_statistics(prepared.call, x.const_data_ptr(),
                                          record.mutable_data_ptr<double>(), batches));
  const at::Tensor records =
      peers ? all_gather(peers, record, Direction::kForward, channels) : record;

  kernels::NormalizeArguments a{};
  a.x = x.const_data_ptr();
  a.z = pointer(added);
  a.y = output.mutable_data_ptr();
  a.weight = channel_param(weight);
  a.bias = channel_param(bias);
  a.relu = fuse_relu;
  a.eps = eps;
  a.records = records.const_data_ptr<double>();
  a.ranks = peers ? peers.group->getSize() : 1;
  a.momentum = momentum.value_or(kernels::kNoMomentum);
  a.num_batches = batches;
  a.running_mean = channel_param(running_mean);
  a.running_var = channel_param(running_var);
  a.mean = mean.mutable_data_ptr<double>();
  a.invstd = invstd.mutable_data_ptr<double>();
  a.count = count.mutable_data_ptr<int64_t>();
  check_launch(kernels::launch_normalize(prepared.call, a));
  store_counter(num_batches_tracked, counter);
  return {output, mean, invstd, count};
}

at::Tensor inference_cuda(const at::Tensor& input, const OptionalTensor& z,
                          const OptionalTensor& weight, const OptionalTensor& bias,
                          const at::Tensor& running_mean, const at::Tensor& running_var, double eps,
                          bool channel_last, bool fuse_relu) {
  check_forward(input, z, weight, bias, running_mean, running_var, std::nullopt, channel_last);
  const c10::cuda::CUDAGuard guard(input.device());
  const MemoryLayout layout = layout_of(input, channel_last);
  const at::Tensor x = to_layout(input, layout);
  const OptionalTensor added = optional_to_layout(z, layout);
  const Sizes sizes = sizes_of(x, layout);
  at::Tensor output = empty_in_layout(x, layout);
  if (output.numel() == 0) {
    return output;
  }
  kernels::NormalizeArguments a{};
  a.x = x.const_data_ptr();
  a.z = pointer(added);
  a.y = output.mutable_data_ptr();
  a.weight = channel_param(weight);
  a.bias = channel_param(bias);
  a.relu = fuse_relu;
  a.eps = eps;
  a.running_mean = channel_param(running_mean);
  a.running_var = channel_param(running_var);
  const bool aligned = is_aligned({a.x, a.z, a.y});
  check_launch(kernels::launch_normalize(prepare(x, sizes, aligned, false).call, a));
  return output;
}

BackwardResult backward_cuda(const at::Tensor& grad_output, const at::Tensor& input,
                             const OptionalTensor& output, const OptionalTensor& weight,
                             const OptionalTensor& bias, const at::Tensor& mean,
                             const at::Tensor& invstd_or_var, const OptionalTensor& count,
                             double eps, bool channel_last, bool fuse_relu, OutputMask needs,
                             c10::string_view group_name) {
  check_backward(grad_output, input, output, weight, bias, mean, invstd_or_var, count,
                 channel_last);
  const c10::cuda::CUDAGuard guard(input.device());
  const MemoryLayout layout = layout_of(input, channel_last);
  const at::Tensor x = to_layout(input, layout);
  const at::Tensor dy = to_layout(grad_output.to(input.scalar_type()), layout);
  const OptionalTensor out = optional_to_layout(output, layout);
  const Sizes sizes = sizes_of(x, layout);
  const int64_t channels = sizes.planes.channels;
  const bool training = is_present(count);
  const Peers peers = training && needs[0] ? find_peers(group_name) : Peers();

  const auto none = [&] { return at::empty({0}, input.options()); };
  const auto parameter = [&](bool needed, const OptionalTensor& p) {
    return needed && is_present(p) ? at::empty({channels}, p->options()) : none();
  };
  at::Tensor dx = needs[0] ? empty_in_layout(x, layout) : none();
  at::Tensor dz = needs[1] && fuse_relu ? empty_in_layout(x, layout) : none();
  at::Tensor dweight = parameter(needs[2], weight);
  at::Tensor dbias = parameter(needs[3], bias);
  if (channels == 0) {
    return {dx, dz, dweight, dbias};
  }

  kernels::GradientArguments a{};
  a.dy = dy.const_data_ptr();
  a.x = x.const_data_ptr();
  a.y = pointer(out);
  a.dx = dx.numel() > 0 ? dx.mutable_data_ptr() : nullptr;
  a.dz = dz.numel() > 0 ? dz.mutable_data_ptr() : nullptr;
  a.mask = !fuse_relu        ? kernels::ReluMask::kNone
           : is_present(out) ? kernels::ReluMask::kOutput
                             : kernels::ReluMask::kRecompute;
  a.weight = channel_param(weight);
  a.bias = channel_param(bias);
  a.statistics = channel_statistics(mean, invstd_or_var, !training, eps);
  a.count = training ? count->const_data_ptr<int64_t>() : nullptr;
  if (dweight.numel() > 0) {
    a.dweight = channel_param(dweight);
  }
  if (dbias.numel() > 0) {
    a.dbias = channel_param(dbias);
  }
  const bool reduces = (training && needs[0]) || a.dweight.present() || a.dbias.present();
  const Prepared prepared = prepare(x, sizes, is_aligned({a.dy, a.x, a.y, a.dx, a.dz}), reduces);
  at::Tensor sums = at::empty({2 * channels}, mean.options().dtype(at::kDouble));
  a.sums = sums.mutable_data_ptr<double>();
  if (reduces) {
    check_launch(kernels::launch_reduce(prepared.call, a));
  }
  if (peers) {
    all_reduce(peers, sums, Direction::kBackward, channels);
  }
  if (a.dx != nullptr || a.dz != nullptr) {
    check_launch(kernels::launch_gradient(prepared.call, a));
  }
  return {dx, dz, dweight, dbias};
}

}  // namespace
}  // namespace apex::parallel::detail

TORCH_LIBRARY_IMPL(apex, CUDA, m) {
  m.impl("sync_batch_norm", &apex::parallel::detail::forward_cuda);
  m.impl("sync_batch_norm_backward", &apex::parallel::detail::backward_cuda);
  m.impl("batch_norm_inference", &apex::parallel::detail::inference_cuda);
}
