// SPDX-License-Identifier: BSD-3-Clause
// What depends on the backend being NCCL, without a GPU: averages in low precision, memory that the
// backend still holds, and messages of several dtypes.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <apex/parallel/detail/model_sync.h>
#include <apex/parallel/reducer.h>
#include <support/fake_device.h>
#include <support/fake_group.h>

#include "step/parameter_sample.h"

namespace apex::testing::fake_nccl {
namespace {

using parallel::NamedTensor;
using parallel::Reducer;
using parallel::ReducerOptions;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Strings = std::vector<std::string>;

/// A parameter with gradients `values`, averaged over `world` mirror images.
at::Tensor averaged(const at::Tensor& values, int world, int64_t cap) {
  fake::MirrorRules rules;
  rules.backend_name = "nccl";
  const at::Tensor factor = values.to(fake::device());
  std::vector<NamedTensor> parameters{{"p", at::zeros_like(factor).requires_grad_()},
                                      {"q", at::zeros({3}, factor.options()).requires_grad_()}};
  ReducerOptions options;
  options.limits.cap = cap;
  Reducer reducer(parameters, {fake::make_mirror_group(world, "wire", rules)}, options);
  for (int step = 0; step < 2; ++step) {
    for (auto& parameter : parameters) parameter.tensor.mutable_grad() = at::Tensor();
    reducer.prepare_for_forward();
    const at::Tensor y = (parameters[0].tensor * factor).sum() + parameters[1].tensor.sum();
    reducer.watch_outputs({y});
    y.backward();
  }
  return fake::peek(parameters[0].tensor.grad());
}

// NCCL's AVG rounds 1/N to the dtype, and each value times that, before the sum.
TEST(FakeNccl, AveragesInLowPrecision_AreSumsThatAreDivided) {
  fake::detector().reset();
  struct Case {
    at::ScalarType dtype;
    int world;
    double scale;  ///< scale of the gradients
    double error;  ///< error of one gradient
  };
  const std::vector<Case> cases{{at::kBFloat16, 3, 1, 0.008}, {at::kBFloat16, 4, 1, 0},
                                {at::kBFloat16, 7, 1, 0.008}, {at::kHalf, 1024, 1e-3, 0},
                                {at::kHalf, 3, 1e-4, 0.002},  {at::kFloat, 3, 1, 2e-7},
                                {at::kFloat, 1024, 1e-30, 0}};
  for (const Case& each : cases) {
    for (const int64_t cap : {1, 1 << 20}) {
      SCOPED_TRACE(::testing::Message() << each.dtype << ", " << each.world << " ranks, " << cap);
      const at::Tensor values = at::rand({1 << 15}).add(1).mul(each.scale).to(each.dtype);
      const at::Tensor want = values.to(at::kDouble);
      const at::Tensor error = (averaged(values, each.world, cap).to(at::kDouble) - want) / want;
      EXPECT_LE(error.abs().max().item<double>(), each.error);
      EXPECT_LT(std::abs(error.mean().item<double>()), 2e-4) << "all are off in one direction";
    }
  }
}

TEST(FakeNccl, SampleOfParameters_SeesAStep_AndIgnoresOneWithoutMemory) {
  for (const at::Device device : {fake::device(), at::Device(at::kCPU)}) {
    const at::Tensor parameter = at::ones({8}, at::device(device));
    parallel::ParameterSample sample;
    sample.watch({parameter});
    parameter.add_(1);
    EXPECT_EQ(sample.take(), 4);  // of the four elements that it samples
    if (!device.is_cpu()) continue;
    parameter.storage().set_data_ptr({nullptr, device});
    EXPECT_EQ(sample.take(), 0);
  }
}

// torch 2.15's NCCL backend may hold them for a second. They do not count as held by a program.
TEST(FakeNccl, BuffersThatTheBackendStillHolds_AreUsedAgain) {
  fake::detector().reset();
  fake::MirrorRules rules;
  rules.backend_name = "nccl2";
  rules.holds_what_it_had = true;
  const at::Tensor p = at::ones({1 << 15}, at::device(fake::device())).requires_grad_();
  Reducer reducer({{"p", p}}, {fake::make_mirror_group(2, "wire", rules)}, {});
  const void* place = nullptr;
  for (int step = 0; step < 4; ++step) {
    p.mutable_grad() = at::Tensor();
    reducer.prepare_for_forward();
    const at::Tensor y = (p * (step + 1)).sum();
    reducer.watch_outputs({y});
    y.backward();
    EXPECT_TRUE(fake::peek(p.grad()).eq(step + 1).all().item<bool>()) << step;
    const void* const now = reducer.buffers().front().const_data_ptr();
    EXPECT_TRUE(step == 0 || now == place) << step;
    place = now;
  }
  EXPECT_EQ(fake::detector().errors(), Strings{});
}

/// E.g. buffers of batch norm: receiving them must not take one operation each.
TEST(FakeNccl, TensorsOfSeveralDtypes_Broadcast_ArriveInOneCopy) {
  fake::detector().reset();
  const Group group = fake::make_mirror_group(2, "wire");
  std::vector<at::Tensor> sources, targets;
  for (int i = 0; i < 12; ++i) {
    for (const at::ScalarType dtype : {at::kHalf, at::kFloat, at::kByte, at::kLong, at::kDouble}) {
      sources.push_back(at::randn({i % 4 + 1}).mul(9).to(dtype).to(fake::device()));
      targets.push_back(at::zeros_like(sources.back()));
    }
  }
  sources.push_back(at::randn({3, 4}, at::device(fake::device())).t());
  targets.push_back(at::zeros({3, 4}, at::device(fake::device())).t());
  parallel::broadcast_coalesced(sources, group, 0);
  const int64_t before = fake::detector().operations();
  parallel::broadcast_coalesced(targets, group, 1);
  // An empty tensor needs no operation; the transposed one is received separately.
  EXPECT_LE(fake::detector().operations() - before, 1 + 1 + 2);
  for (size_t i = 0; i < sources.size(); ++i) {
    EXPECT_TRUE(fake::peek(targets[i]).equal(fake::peek(sources[i]))) << i;
  }
  EXPECT_EQ(fake::detector().errors(), Strings{});
}

}  // namespace
}  // namespace apex::testing::fake_nccl
