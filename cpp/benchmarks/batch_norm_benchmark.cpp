#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "kernels/batch_norm_cpu.h"

// The passes of batch norm on the CPU over one input, without operators around them: Welford statistics and
// normalization forward, the two sums and the gradient backward. The copy of the input is beside them as the
// floor.

namespace {

using apex::kernels::cpu_kernels;
using apex::kernels::CpuKernels;
using apex::kernels::GradientCoefficients;
using apex::kernels::NormalizeCoefficients;
using apex::kernels::Planes;
using apex::kernels::ReluMask;

enum class Pass { kCopy, kStatistics, kNormalize, kReduce, kGradient };

/// Memory as tensors have it: at the start of a cache line, where vectors can be stored past the caches.
template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* p, size_t) { ::operator delete(p, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
};

template <typename T>
struct Data {
  using Acc = typename CpuKernels<T>::Acc;

  Planes sizes;
  std::vector<T, LineAllocator<T>> x, dy, result;
  std::vector<double> sums;
  std::vector<Acc> ones;

  explicit Data(Planes planes)
      : sizes(planes),
        x(static_cast<size_t>(planes.batch * planes.channels * planes.plane)),
        dy(x.size()),
        result(x.size()),
        sums(static_cast<size_t>(2 * planes.channels)),
        ones(static_cast<size_t>(planes.channels), Acc(1)) {
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<T>(static_cast<float>(i % 251) / 64.0f);
      dy[i] = static_cast<T>(static_cast<float>(i % 241) / 128.0f);
    }
  }
};

template <typename T>
void planes(Pass pass, Data<T>& data, bool stream) {
  using Acc = typename CpuKernels<T>::Acc;
  const CpuKernels<T>& k = cpu_kernels<T>();
  const NormalizeCoefficients<Acc> forward{1, 1, 1};
  for (int64_t c = 0; c < data.sizes.channels; ++c) {
    if (pass == Pass::kStatistics) {
      benchmark::DoNotOptimize(k.planes_statistics(data.x.data(), data.sizes, c));
    } else if (pass == Pass::kNormalize) {
      k.planes_normalize(data.x.data(), nullptr, data.result.data(), data.sizes, c, forward, false,
                         stream);
    } else if (pass == Pass::kReduce) {
      benchmark::DoNotOptimize(k.planes_reduce(data.dy.data(), data.x.data(), nullptr, data.sizes, c, forward,
                                               ReluMask::kNone));
    } else {
      k.planes_gradient(data.dy.data(), data.x.data(), nullptr, data.result.data(), nullptr, data.sizes, c,
                        forward, GradientCoefficients<Acc>{1, 1, 1, 1}, ReluMask::kNone, stream);
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
    k.rows_statistics(data.x.data(), 0, count, channels, sums, sums + channels, 0);
  } else if (pass == Pass::kNormalize) {
    k.rows_normalize(data.x.data(), nullptr, data.result.data(), 0, count, channels, one, one, one, false,
                     stream);
  } else if (pass == Pass::kReduce) {
    k.rows_reduce(data.dy.data(), data.x.data(), nullptr, 0, count, channels, one, one, one, ReluMask::kNone,
                  sums, sums + channels);
  } else {
    k.rows_gradient(data.dy.data(), data.x.data(), nullptr, data.result.data(), nullptr, 0, count, channels,
                    coefficients, coefficients, ReluMask::kNone, stream);
  }
}

/// Arguments: channels and height = width of a batch of 16, 1 for channels last, 1 for results that are
/// written past the caches.
template <typename T, Pass kPass>
void BatchNorm(benchmark::State& state) {
  Data<T> data(Planes{16, state.range(0), state.range(1) * state.range(1)});
  const bool channels_last = state.range(2) != 0;
  const bool stream = state.range(3) != 0;
  for (auto _ : state) {
    if constexpr (kPass == Pass::kCopy) {
      std::copy(data.x.begin(), data.x.end(), data.result.begin());
    } else if (channels_last) {
      rows(kPass, data, stream);
    } else {
      planes(kPass, data, stream);
    }
    benchmark::ClobberMemory();
  }
  const auto elements = static_cast<double>(data.x.size());
  constexpr int kArrays[] = {2, 1, 2, 2, 3};  // read or written by each pass
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(data.x.size() * sizeof(T)) *
                          kArrays[static_cast<int>(kPass)]);
  state.counters["ns_per_element"] =
      benchmark::Counter(elements * 1e-9, benchmark::Counter::kIsIterationInvariantRate |
                                              benchmark::Counter::kInvert);
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

#define APEX_BATCH_NORM_PASSES(type)                                              \
  BENCHMARK_TEMPLATE2(BatchNorm, type, Pass::kCopy)->Apply(layers<false>);        \
  BENCHMARK_TEMPLATE2(BatchNorm, type, Pass::kStatistics)->Apply(layers<false>);  \
  BENCHMARK_TEMPLATE2(BatchNorm, type, Pass::kNormalize)->Apply(layers<true>);    \
  BENCHMARK_TEMPLATE2(BatchNorm, type, Pass::kReduce)->Apply(layers<false>);      \
  BENCHMARK_TEMPLATE2(BatchNorm, type, Pass::kGradient)->Apply(layers<true>)
APEX_BATCH_NORM_PASSES(float);
APEX_BATCH_NORM_PASSES(at::BFloat16);

}  // namespace
