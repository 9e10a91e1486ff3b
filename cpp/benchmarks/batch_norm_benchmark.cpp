// SPDX-License-Identifier: BSD-3-Clause
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "kernels/batch_norm_cpu.h"

// The passes of batch norm on the CPU over one input, without operators around them: Welford
// statistics and normalization forward, the two sums and the gradient backward. The copy of the
// input is beside them as the floor.

namespace {

using apex::kernels::cpu_kernels;
using apex::kernels::CpuKernels;
using apex::kernels::GradientCoefficients;
using apex::kernels::NormalizeCoefficients;
using apex::kernels::Planes;
using apex::kernels::ReluMask;

enum class Pass { kCopy, kStatistics, kNormalize, kReduce, kGradient };

template <typename T>
struct Data {
  using Acc = typename CpuKernels<T>::Acc;

  Planes sizes;
  at::Tensor tensors[3];
  const T* x;
  const T* dy;
  T* result;
  std::vector<double> sums;
  std::vector<Acc> ones;

  explicit Data(Planes planes)
      : sizes(planes),
        sums(static_cast<size_t>(2 * planes.channels)),
        ones(static_cast<size_t>(planes.channels), Acc(1)) {
    for (at::Tensor& tensor : tensors)
      tensor = at::randn({numel()}).to(c10::CppTypeToScalarType<T>::value);
    x = tensors[0].const_data_ptr<T>();
    dy = tensors[1].const_data_ptr<T>();
    result = tensors[2].mutable_data_ptr<T>();
  }
  int64_t numel() const { return sizes.batch * sizes.channels * sizes.plane; }
};

template <typename T>
void planes(Pass pass, Data<T>& data, bool stream) {
  using Acc = typename CpuKernels<T>::Acc;
  const CpuKernels<T>& k = cpu_kernels<T>();
  const NormalizeCoefficients<Acc> forward{1, 1, 1};
  for (int64_t c = 0; c < data.sizes.channels; ++c) {
    if (pass == Pass::kStatistics) {
      benchmark::DoNotOptimize(k.planes_statistics(data.x, data.sizes, c));
    } else if (pass == Pass::kNormalize) {
      k.planes_normalize(data.x, nullptr, data.result, data.sizes, c, forward, false, stream);
    } else if (pass == Pass::kReduce) {
      benchmark::DoNotOptimize(
          k.planes_reduce(data.dy, data.x, nullptr, data.sizes, c, forward, ReluMask::kNone));
    } else {
      k.planes_gradient(data.dy, data.x, nullptr, data.result, nullptr, data.sizes, c, forward,
                        GradientCoefficients<Acc>{1, 1, 1, 1}, ReluMask::kNone, stream);
    }
  }
}

template <typename T>
void rows(Pass pass, Data<T>& data, bool stream) {
  using Acc = typename CpuKernels<T>::Acc;
  const CpuKernels<T>& k = cpu_kernels<T>();
  const int64_t channels = data.sizes.channels;
  const int64_t count = data.sizes.batch * data.sizes.plane;
  const Acc* one = data.ones.data();
  const Acc* const coefficients[3] = {one, one, one};
  double* sums = data.sums.data();
  if (pass == Pass::kStatistics) {
    k.rows_statistics(data.x, 0, count, channels, sums, sums + channels, 0);
  } else if (pass == Pass::kNormalize) {
    k.rows_normalize(data.x, nullptr, data.result, 0, count, channels, one, one, one, false,
                     stream);
  } else if (pass == Pass::kReduce) {
    k.rows_reduce(data.dy, data.x, nullptr, 0, count, channels, one, one, one, ReluMask::kNone,
                  sums, sums + channels);
  } else {
    k.rows_gradient(data.dy, data.x, nullptr, data.result, nullptr, 0, count, channels,
                    coefficients, coefficients, ReluMask::kNone, stream);
  }
}

/// Arguments: channels and height = width of a batch of 16, 1 for channels last, 1 for results that
/// are written past the caches.
template <typename T, Pass kPass>
void BatchNorm(benchmark::State& state) {
  Data<T> data(Planes{16, state.range(0), state.range(1) * state.range(1)});
  const bool channels_last = state.range(2) != 0;
  const bool stream = state.range(3) != 0;
  for (auto _ : state) {
    if constexpr (kPass == Pass::kCopy) {
      std::copy(data.x, data.x + data.numel(), data.result);
    } else if (channels_last) {
      rows(kPass, data, stream);
    } else {
      planes(kPass, data, stream);
    }
    benchmark::ClobberMemory();
  }
  constexpr int kArrays[] = {2, 1, 2, 2, 3};  // read or written by each pass
  state.SetBytesProcessed(state.iterations() * data.numel() * static_cast<int64_t>(sizeof(T)) *
                          kArrays[static_cast<int>(kPass)]);
  state.counters["ns_per_element"] = benchmark::Counter(
      static_cast<double>(data.numel()) * 1e-9,
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

/// One layer whose arrays fit into the last cache, one whose do not.
template <bool kWrites>
void layers(benchmark::internal::Benchmark* registered) {
  registered->ArgNames({"channels", "side", "last", "stream"});
  for (const int channels_last : {0, 1}) {
    registered->Args({256, 14, channels_last, 0});
    registered->Args({512, 28, channels_last, static_cast<int>(kWrites)});
  }
}

#define APEX_BATCH_NORM_PASSES(type)                                             \
  BENCHMARK_TEMPLATE2(BatchNorm, type, Pass::kCopy)->Apply(layers<false>);       \
  BENCHMARK_TEMPLATE2(BatchNorm, type, Pass::kStatistics)->Apply(layers<false>); \
  BENCHMARK_TEMPLATE2(BatchNorm, type, Pass::kNormalize)->Apply(layers<true>);   \
  BENCHMARK_TEMPLATE2(BatchNorm, type, Pass::kReduce)->Apply(layers<false>);     \
  BENCHMARK_TEMPLATE2(BatchNorm, type, Pass::kGradient)->Apply(layers<true>)
APEX_BATCH_NORM_PASSES(float);
APEX_BATCH_NORM_PASSES(at::BFloat16);

}  // namespace
