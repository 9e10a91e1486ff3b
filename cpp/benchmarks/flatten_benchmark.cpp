// SPDX-License-Identifier: BSD-3-Clause
#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "reducer/bucket_message.h"

// A bucket's way without the network: gradients into the message, the average, and back. The copy
// of one flat tensor of the same size is beside it as the floor.

namespace {

using apex::parallel::detail::BucketMessage;
using apex::parallel::detail::MessageOptions;

struct Gradients {
  std::vector<at::Tensor> variables;
  std::vector<int64_t> members;
  std::vector<uint8_t> used;

  Gradients(int64_t count, int64_t numel) : used(count, 1) {
    for (int64_t i = 0; i < count; ++i) {
      at::Tensor variable = at::zeros({numel}).requires_grad_();
      variable.mutable_grad() = at::randn({numel});
      variables.push_back(variable);
      members.push_back(i);
    }
  }
};

/// Arguments: number of gradients, elements of each, 1 for gradients that stay views of the buffer.
void PackAndUnpack(benchmark::State& state) {
  Gradients gradients(state.range(0), state.range(1));
  MessageOptions options;
  options.gradient_as_bucket_view = state.range(2) != 0;
  const auto kind =
      state.range(0) == 1 ? BucketMessage::Kind::kInPlace : BucketMessage::Kind::kFlat;
  BucketMessage bucket(kind, gradients.members, gradients.variables, {}, at::kCPU, options);
  for (auto _ : state) {
    bucket.pack(gradients.used, 1.0);
    bucket.unpack(0.5, gradients.used);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) * state.range(1) *
                          static_cast<int64_t>(sizeof(float)));
  state.counters["copied"] = static_cast<double>(bucket.copied());
}
BENCHMARK(PackAndUnpack)
    ->ArgNames({"gradients", "numel", "views"})
    ->ArgsProduct({{100}, {64, 4096, 65536}, {0, 1}})
    ->Args({1, 1 << 24, 0});

void FlatCopy(benchmark::State& state) {
  const at::Tensor from = at::randn({state.range(0)});
  const at::Tensor to = at::empty_like(from);
  for (auto _ : state) {
    to.copy_(from);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) *
                          static_cast<int64_t>(sizeof(float)));
}
BENCHMARK(FlatCopy)->Arg(100 * 64)->Arg(100 * 4096)->Arg(100 * 65536);

}  // namespace
