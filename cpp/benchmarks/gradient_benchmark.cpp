// SPDX-License-Identifier: BSD-3-Clause
#include <benchmark/benchmark.h>

#include <cstdint>

#include <ATen/ATen.h>

#include "reducer/multi_tensor.h"
#include "step/replica_digest.h"

// What a step pays for gradient_statistics, by gradient that is copied with and without a sum of
// squares; and for replicas that are compared, by the part that is read for a digest.

namespace {

using apex::parallel::copy_in_one_pass;

/// Arguments: elements; scaled; measured.
void CopyGradient(benchmark::State& state) {
  const at::Tensor source = at::ones({state.range(0)}), target = at::empty_like(source);
  const double scale = state.range(1) != 0 ? 0.5 : 1.0;
  double squares = 0;
  for (auto _ : state) {
    copy_in_one_pass(target, source, scale, state.range(2) != 0 ? &squares : nullptr);
    benchmark::DoNotOptimize(squares);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(2 * source.nbytes()));
}
BENCHMARK(CopyGradient)->ArgsProduct({{64, 1 << 16, 1 << 22}, {0, 1}, {0, 1}});

/// Argument: elements.
void DigestOfPart(benchmark::State& state) {
  const at::Tensor values = at::ones({state.range(0)});
  for (auto _ : state)
    benchmark::DoNotOptimize(apex::parallel::digest_of_part({{"a", values}}, 0, 1));
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(values.nbytes()));
}
BENCHMARK(DigestOfPart)->Arg(64)->Arg(1 << 16)->Arg(1 << 22);

}  // namespace
