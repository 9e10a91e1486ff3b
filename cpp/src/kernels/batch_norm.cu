// SPDX-License-Identifier: BSD-3-Clause
// Implementation of batch_norm_cuda.h.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "batch_norm_planes.cuh"
#include "batch_norm_rows.cuh"

namespace apex::kernels {
namespace {

__global__ void __launch_bounds__(kBlockThreads)
    merge_statistics_kernel(MergePlan plan, const Sums* partial, double* record) {
  merge_splits(plan.channels, plan.splits, partial, [&](int64_t channel, const Sums& all) {
    from_moments(all, record[channel], record[2 * plan.channels], record + channel,
                 record + plan.channels + channel);
  });
}

__global__ void __launch_bounds__(kBlockThreads)
    merge_reduction_kernel(MergePlan plan, const Sums* partial, GradientArguments a) {
  merge_splits(plan.channels, plan.splits, partial, [&](int64_t channel, const Sums& all) {
    finish_reduction(a, channel, plan.channels, all);
  });
}

template <typename F>
int visit(c10::ScalarType type, F&& f) {
  switch (type) {
    case c10::ScalarType::Float:
      return f(float{});
    case c10::ScalarType::Double:
      return f(double{});
    case c10::ScalarType::Half:
      return f(c10::Half{});
    default:
      return f(c10::BFloat16{});
  }
}

int element_bytes(c10::ScalarType type) { return static_cast<int>(c10::elementSize(type)); }

/// Returns f(T, std::integral_constant<vector width>) for the width that the plans choose.
template <typename F>
int visit_vector(const CudaCall& call, F&& f) {
  const int vector = vector_width(call.rows ? call.sizes.channels : call.sizes.plane,
                                  element_bytes(call.type), call.aligned);
  return visit(call.type, [&](auto tag) {
    using T = decltype(tag);
    constexpr int kFull = kLoadBytes / int{sizeof(T)};
    if (vector == kFull) {
      return f(tag, std::integral_constant<int, kFull>{});
    }
    if (vector == 1) {  // also kFull / 2 of float64
      return f(tag, std::integral_constant<int, 1>{});
    }
    return f(tag, std::integral_constant<int, kFull / 2>{});
  });
}

/// The limits of one kernel, given its registers and shared memory. Queried once per device and
/// kernel.
template <typename Kernel>
DeviceLimits limits_of(const CudaCall& call, Kernel* kernel) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> known;
  int device = 0;
  DeviceLimits limits = call.limits;
  if (cudaGetDevice(&device) != cudaSuccess) {
    return limits;  // the launch will fail with this error
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::pair(device, reinterpret_cast<const void*>(kernel));
  auto found = known.find(key);
  if (found == known.end()) {
    int blocks = 0;
    if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kBlockThreads, 0) !=
            cudaSuccess ||
        blocks == 0) {
      return limits;
    }
    found = known.emplace(key, blocks * kBlockThreads).first;
  }
  limits.threads_per_multiprocessor = std::min(limits.threads_per_multiprocessor, found->second);
  return limits;
}

/// Launches with a function, because the tests compile this file for the host, and only nvcc
/// compiles <<<>>>.
template <typename Kernel, typename Plan, typename... Arguments>
int launch(const CudaCall& call, const Plan& plan, int threads, Kernel* kernel,
           const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks()));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(call.stream);
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, plan, arguments...));
}

PlanesPlan planes_plan(const CudaCall& call, const DeviceLimits& limits) {
  return plan_planes(call.sizes, element_bytes(call.type), call.aligned, limits);
}

RowsPlan rows_plan(const CudaCall& call, const DeviceLimits& limits, bool reduces) {
  return plan_rows(call.sizes.batch * call.sizes.plane, call.sizes.channels,
                   element_bytes(call.type), call.aligned, limits, reduces);
}

/// Launches the kernel for the layout.
template <typename Arguments>
int launch_elementwise(const CudaCall& call, const Arguments& arguments) {
  return visit_vector(call, [&](auto tag, auto width) {
    using T = decltype(tag);
    if (call.rows) {
      auto* const kernel = rows_elementwise_kernel<Arguments, T, width>;
      const RowsPlan plan = rows_plan(call, limits_of(call, kernel), false);
      return launch(call, plan, plan.threads(), kernel, arguments);
    }
    auto* const kernel = planes_elementwise_kernel<Arguments, T, width>;
    const PlanesPlan plan = planes_plan(call, limits_of(call, kernel));
    return launch(call, plan, plan.threads, kernel, arguments);
  });
}

/// The same for a reduction, and its merge. See Note [Blocks that share a channel].
template <typename PlanesKernel, typename RowsKernel, typename Merge, typename... Arguments>
int launch_reduction(const CudaCall& call, PlanesKernel* of_planes, RowsKernel* of_rows,
                     Merge&& merge, const Arguments&... arguments) {
  auto* const partial = reinterpret_cast<Sums*>(call.partial);
  MergePlan plan{call.sizes.channels, 1};
  int error = 0;
  if (call.rows) {
    const RowsPlan rows = rows_plan(call, call.limits, true);
    plan.splits = rows.splits;
    error = launch(call, rows, rows.threads(), of_rows, partial, arguments...);
  } else {
    const PlanesPlan planes = planes_plan(call, limits_of(call, of_planes));
    plan.splits = planes.splits;
    error = launch(call, planes, planes.threads, of_planes, partial, arguments...);
  }
  return error != 0 || plan.splits == 1 ? error : merge(plan, partial);
}

}  // namespace

int64_t partial_length(const CudaCall& call) {
  if (call.rows) return 2 * call.sizes.channels * rows_plan(call, call.limits, true).splits;
  return 2 * most_planes_blocks(call.sizes, element_bytes(call.type), call.aligned, call.limits);
}

int launch_statistics(const CudaCall& call, const void* x, double* record,
                      int64_t* num_batches_tracked) {
  return visit_vector(call, [&](auto tag, auto width) {
    using T = decltype(tag);
    return launch_reduction(
        call, planes_statistics_kernel<T, width>, rows_statistics_kernel<T, width>,
        [&](const MergePlan& plan, const Sums* partial) {
          return launch(call, plan, kBlockThreads, merge_statistics_kernel, partial, record);
        },
        static_cast<const T*>(x), record, num_batches_tracked);
  });
}

int launch_normalize(const CudaCall& call, const NormalizeArguments& arguments) {
  return launch_elementwise(call, arguments);
}

int launch_reduce(const CudaCall& call, const GradientArguments& arguments) {
  return visit_vector(call, [&](auto tag, auto width) {
    using T = decltype(tag);
    return launch_reduction(
        call, planes_reduce_kernel<T, width>, rows_reduce_kernel<T, width>,
        [&](const MergePlan& plan, const Sums* partial) {
          return launch(call, plan, kBlockThreads, merge_reduction_kernel, partial, arguments);
        },
        arguments);
  });
}

int launch_gradient(const CudaCall& call, const GradientArguments& arguments) {
  return launch_elementwise(call, arguments);
}

}  // namespace apex::kernels
