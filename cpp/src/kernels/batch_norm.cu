// SPDX-License-Identifier: BSD-3-Clause
// The launches of batch_norm_cuda.h.

#include <cuda_runtime.h>

#include <type_traits>

#include "batch_norm_planes.cuh"
#include "batch_norm_rows.cuh"

namespace apex::kernels {
namespace {

template <typename F>
int visit(ElementType type, F&& f) {
  switch (type) {
    case ElementType::kFloat32:
      return f(float{});
    case ElementType::kFloat64:
      return f(double{});
    case ElementType::kFloat16:
      return f(c10::Half{});
    default:
      return f(c10::BFloat16{});
  }
}

int element_bytes(ElementType type) {
  return type == ElementType::kFloat64 ? 8 : (type == ElementType::kFloat32 ? 4 : 2);
}

PlanesPlan planes_plan(const CudaCall& call) {
  return plan_planes(call.sizes, element_bytes(call.type), call.aligned, call.limits);
}

RowsPlan rows_plan(const CudaCall& call, bool reduces) {
  return plan_rows(call.sizes.batch * call.sizes.plane, call.sizes.channels,
                   element_bytes(call.type), call.aligned, call.limits, reduces);
}

/// Returns f(T, std::integral_constant<vector width>) for the width the plan chose.
template <typename F>
int visit_vector(ElementType type, int vector, F&& f) {
  return visit(type, [&](auto tag) {
    using T = decltype(tag);
    constexpr int kFull = kLoadBytes / int{sizeof(T)};
    if (vector == kFull) {
      return f(tag, std::integral_constant<int, kFull>{});
    }
    if (vector == 1) {  // also half of two
      return f(tag, std::integral_constant<int, 1>{});
    }
    return f(tag, std::integral_constant<int, kFull / 2>{});
  });
}

/// By a function instead of <<<>>>, which only nvcc reads: the tests compile this file for the
/// host.
template <typename Kernel, typename... Arguments>
int launch(const CudaCall& call, int64_t blocks, int threads, Kernel* kernel,
           const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(call.stream);
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace

int64_t partial_length(const CudaCall& call) {
  if (call.rows) {
    const RowsPlan plan = rows_plan(call, true);
    return plan.tiles * plan.splits * 2 * plan.tile_channels();
  }
  return planes_plan(call).blocks() * 2;
}

int64_t counters_length(const CudaCall& call) {
  return call.rows ? rows_plan(call, true).tiles : call.sizes.channels;
}

int launch_statistics(const CudaCall& call, const void* x, double* record,
                      int64_t* num_batches_tracked) {
  if (call.rows) {
    const RowsPlan plan = rows_plan(call, true);
    return visit_vector(call.type, plan.vector, [&](auto tag, auto width) {
      using T = decltype(tag);
      return launch(call, plan.blocks(), plan.threads(), rows_statistics_kernel<T, width>, plan,
                    static_cast<const T*>(x), record, call.partial, call.counters,
                    num_batches_tracked);
    });
  }
  const PlanesPlan plan = planes_plan(call);
  return visit_vector(call.type, plan.vector, [&](auto tag, auto width) {
    using T = decltype(tag);
    return launch(call, plan.blocks(), plan.threads, planes_statistics_kernel<T, width>, plan,
                  static_cast<const T*>(x), record, call.partial, call.counters,
                  num_batches_tracked);
  });
}

int launch_normalize(const CudaCall& call, const NormalizeArguments& arguments) {
  if (call.rows) {
    const RowsPlan plan = rows_plan(call, false);
    return visit_vector(call.type, plan.vector, [&](auto tag, auto width) {
      return launch(call, plan.blocks(), plan.threads(),
                    rows_normalize_kernel<decltype(tag), width>, plan, arguments);
    });
  }
  const PlanesPlan plan = planes_plan(call);
  return visit_vector(call.type, plan.vector, [&](auto tag, auto width) {
    return launch(call, plan.blocks(), plan.threads, planes_normalize_kernel<decltype(tag), width>,
                  plan, arguments);
  });
}

int launch_reduce(const CudaCall& call, const GradientArguments& arguments) {
  if (call.rows) {
    const RowsPlan plan = rows_plan(call, true);
    return visit_vector(call.type, plan.vector, [&](auto tag, auto width) {
      return launch(call, plan.blocks(), plan.threads(), rows_reduce_kernel<decltype(tag), width>,
                    plan, arguments, call.partial, call.counters);
    });
  }
  const PlanesPlan plan = planes_plan(call);
  return visit_vector(call.type, plan.vector, [&](auto tag, auto width) {
    return launch(call, plan.blocks(), plan.threads, planes_reduce_kernel<decltype(tag), width>,
                  plan, arguments, call.partial, call.counters);
  });
}

int launch_gradient(const CudaCall& call, const GradientArguments& arguments) {
  if (call.rows) {
    const RowsPlan plan = rows_plan(call, false);
    return visit_vector(call.type, plan.vector, [&](auto tag, auto width) {
      return launch(call, plan.blocks(), plan.threads(), rows_gradient_kernel<decltype(tag), width>,
                    plan, arguments);
    });
  }
  const PlanesPlan plan = planes_plan(call);
  return visit_vector(call.type, plan.vector, [&](auto tag, auto width) {
    return launch(call, plan.blocks(), plan.threads, planes_gradient_kernel<decltype(tag), width>,
                  plan, arguments);
  });
}

}  // namespace apex::kernels
