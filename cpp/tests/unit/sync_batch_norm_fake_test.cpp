// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

#include <apex/error.h>
#include <apex/parallel/sync_batch_norm.h>
#include <support/cuda_emulator/cuda_emulator.h>
#include <support/fake_capture.h>
#include <support/fake_device.h>
#include <support/fake_group.h>

// The CUDA operators of batch norm, with emulated kernels, on the fake device. Results equal the
// CPU's, streams are ordered, the host never waits, and launches are counted.

namespace apex::testing {
namespace {

using parallel::SyncBatchNormOptions;
using Strings = std::vector<std::string>;

constexpr int kWorld = 2;

/// A layer's batch with its other tensors.
struct Layer {
  at::Tensor x, dy, weight, bias, running_mean, running_var, num_batches;

  std::vector<at::Tensor*> all() {
    return {&x, &dy, &weight, &bias, &running_mean, &running_var, &num_batches};
  }
  Layer to(c10::Device device) const {
    Layer moved = *this;
    for (at::Tensor* tensor : moved.all()) {
      if (tensor->defined()) *tensor = tensor->to(device);
    }
    return moved;
  }
  /// The batch of all ranks, which are mirror images.
  Layer whole(int ranks) const {
    Layer all = *this;
    for (at::Tensor* tensor : {&all.x, &all.dy}) {
      if (tensor->defined()) *tensor = at::cat(std::vector<at::Tensor>(ranks, *tensor));
    }
    for (at::Tensor* tensor : {&all.running_mean, &all.running_var, &all.num_batches}) {
      if (tensor->defined()) *tensor = tensor->clone();
    }
    return all;
  }

  at::Tensor forward(const SyncBatchNormOptions& options) const {
    return parallel::SyncBatchNormImpl(options, weight, bias, running_mean, running_var,
                                       num_batches)
        .forward(x);
  }
};

/// The results of a forward and backward, and gradients by x, weight and bias.
struct Results {
  at::Tensor y;
  std::vector<at::Tensor> gradients;
};

/// The number of channels in the options is not used, since the tensors are given.
const SyncBatchNormOptions kDefault(1);

SyncBatchNormOptions with_mirrors(int ranks = kWorld) {
  return SyncBatchNormOptions(1).process_group(fake::make_mirror_group(ranks, "wire"));
}

Results run(Layer& layer, const SyncBatchNormOptions& options) {
  std::vector<at::Tensor> inputs{layer.x.requires_grad_()};
  for (at::Tensor* tensor : {&layer.weight, &layer.bias}) {
    if (tensor->defined()) inputs.push_back(tensor->requires_grad_());
  }
  const at::Tensor y = layer.forward(options);
  return {y.detach(), torch::autograd::grad({y}, inputs, {layer.dy})};
}

void expect_close(const at::Tensor& device, const at::Tensor& want, double tolerance,
                  const std::string& what) {
  EXPECT_TRUE(device.is_privateuseone()) << what;
  EXPECT_EQ(device.scalar_type(), want.scalar_type()) << what;
  const at::Tensor error = (fake::peek(device).to(at::kDouble) - want.to(at::kDouble)).abs().max();
  EXPECT_LE(error.item<double>(), tolerance * (1 + want.abs().max().item<double>())) << what;
}

class SyncBatchNormFake : public ::testing::Test {
 protected:
  SyncBatchNormFake() : guard_(fake::new_stream("training")) {
    fake::detector().reset();
    at::Generator(at::detail::getDefaultCPUGenerator()).set_current_seed(3);
    cuda::set_order(9);
  }
  ~SyncBatchNormFake() override {
    EXPECT_EQ(fake::detector().errors(), Strings{});
    EXPECT_EQ(fake::detector().host_waits(), Strings{});
    cuda::set_order(0);
  }

  /// Copies to the device and back would make the host wait.
  static at::Tensor on_device(const at::Tensor& tensor) {
    return tensor.to(fake::device(), /*non_blocking=*/true);
  }

  static Layer make(at::ScalarType dtype, at::IntArrayRef shape, int64_t channels) {
    Layer layer;
    layer.x = at::randn(shape).to(dtype);
    layer.dy = at::randn(shape).to(dtype);
    const at::ScalarType parameters = dtype == at::kHalf ? at::kFloat : dtype;
    layer.weight = at::rand({channels}).add(0.5).to(parameters);
    layer.bias = at::randn({channels}).to(parameters);
    layer.running_mean = at::randn({channels}).to(parameters);
    layer.running_var = at::rand({channels}).add(0.5).to(parameters);
    layer.num_batches = at::full({}, 6, at::kLong);
    return layer;
  }

  static Layer move(const Layer& layer) {
    Layer moved = layer;
    for (at::Tensor* tensor : moved.all()) {
      if (tensor->defined()) *tensor = on_device(*tensor);
    }
    return moved;
  }

  const c10::StreamGuard guard_;
};

enum class Memory { kContiguous, kChannelsLast, kChannelLast, kStrided, kFlat };

class SyncBatchNormFakeCases
    : public SyncBatchNormFake,
      public ::testing::WithParamInterface<std::tuple<at::ScalarType, Memory, bool>> {};

TEST_P(SyncBatchNormFakeCases, ForwardAndBackward_EqualTheCpus) {
  const auto& [dtype, memory, grouped] = GetParam();
  const int64_t channels = 6;
  const std::vector<int64_t> shape = memory == Memory::kFlat ? std::vector<int64_t>{11, channels}
                                     : memory == Memory::kChannelLast
                                         ? std::vector<int64_t>{3, 5, 8, channels}
                                         : std::vector<int64_t>{3, channels, 5, 8};
  Layer host = make(dtype, shape, channels);
  for (at::Tensor* tensor : {&host.x, &host.dy}) {
    if (memory == Memory::kChannelsLast)
      *tensor = tensor->contiguous(at::MemoryFormat::ChannelsLast);
    if (memory == Memory::kStrided) *tensor = tensor->transpose(2, 3).contiguous().transpose(2, 3);
  }
  Layer device = move(host);
  if (memory == Memory::kStrided) {
    ASSERT_FALSE(device.x.is_contiguous());
  }
  Layer whole = host.whole(grouped ? kWorld : 1);
  SyncBatchNormOptions on_device = grouped ? with_mirrors() : kDefault, on_host = kDefault;
  for (SyncBatchNormOptions* options : {&on_device, &on_host}) {
    options->channel_last(memory == Memory::kChannelLast);
    if (grouped) options->momentum(std::nullopt);
  }

  const int64_t launches = cuda::launches();
  const Results got = run(device, on_device);
  EXPECT_EQ(cuda::launches() - launches, 4);
  const Results want = run(whole, on_host);

  // Channels-last memory is kept; other strides become contiguous.
  EXPECT_EQ(got.y.strides(),
            memory == Memory::kStrided ? got.y.contiguous().strides() : host.x.strides());
  EXPECT_EQ(got.gradients[0].strides(), got.y.strides());

  const double unit = dtype == at::kDouble  ? 1e-13
                      : dtype == at::kFloat ? 1e-6
                      : dtype == at::kHalf  ? 1e-3
                                            : 8e-3;
  const auto part = [&](const at::Tensor& all) { return all.narrow(0, 0, shape[0]); };
  expect_close(got.y, part(want.y), unit, "y");
  expect_close(got.gradients[0], part(want.gradients[0]), 4 * unit, "dx");
  // Each rank has the parameter gradients of its own part.
  const int64_t ranks = grouped ? kWorld : 1;
  expect_close(got.gradients[1], want.gradients[1].div(ranks), 2 * unit, "dweight");
  expect_close(got.gradients[2], want.gradients[2].div(ranks), 2 * unit, "dbias");
  expect_close(device.running_mean, whole.running_mean, unit, "running_mean");
  expect_close(device.running_var, whole.running_var, unit, "running_var");
  EXPECT_EQ(fake::peek(device.num_batches).item<int64_t>(), 7);
}

std::string name_of_case(
    const ::testing::TestParamInfo<SyncBatchNormFakeCases::ParamType>& tested) {
  const auto& [dtype, memory, grouped] = tested.param;
  const char* const memories[] = {"Contiguous", "ChannelsLast", "ChannelLast", "Strided", "Flat"};
  return std::string(c10::toString(dtype)) + memories[static_cast<int>(memory)] +
         (grouped ? "Grouped" : "");
}

INSTANTIATE_TEST_SUITE_P(
    All, SyncBatchNormFakeCases,
    ::testing::Combine(::testing::Values(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16),
                       ::testing::Values(Memory::kContiguous, Memory::kChannelsLast,
                                         Memory::kChannelLast, Memory::kStrided, Memory::kFlat),
                       ::testing::Bool()),
    name_of_case);

TEST_F(SyncBatchNormFake, Step_WithAGroup_TakesTwoLaunchesAndOneCollectivePerDirection) {
  Layer layer = move(make(at::kFloat, {4, 6, 7, 7}, 6));
  const SyncBatchNormOptions options = with_mirrors();
  layer.x.requires_grad_();
  fake::detector().reset();
  const at::Tensor y = layer.forward(options);
  EXPECT_EQ(fake::detector().operations(), 3);
  y.backward(layer.dy);
  EXPECT_EQ(fake::detector().operations(), 6);
}

TEST_F(SyncBatchNormFake, NothingOptional_IsPlainNormalization) {
  Layer host;
  host.x = at::randn({5, 3, 4});
  host.dy = at::randn({5, 3, 4});
  Layer device = move(host);
  const Results got = run(device, kDefault), want = run(host, kDefault);
  expect_close(got.y, want.y, 1e-6, "y");
  expect_close(got.gradients[0], want.gradients[0], 1e-6, "dx");
}

TEST_F(SyncBatchNormFake, StridedParametersAndOtherCounters_EqualTheCpus) {
  Layer host = make(at::kFloat, {5, 4, 9}, 4);
  for (at::Tensor* tensor : {&host.weight, &host.bias, &host.running_mean, &host.running_var}) {
    *tensor = at::stack({*tensor, *tensor}, 1);
  }
  host.num_batches = at::full({}, 6, at::kInt);
  Layer device = move(host);
  for (Layer* layer : {&host, &device}) {
    for (at::Tensor* tensor :
         {&layer->weight, &layer->bias, &layer->running_mean, &layer->running_var}) {
      *tensor = tensor->select(1, 0);
      ASSERT_EQ(tensor->stride(0), 2);
    }
  }
  const auto options = SyncBatchNormOptions(1).momentum(std::nullopt);
  const Results got = run(device, options), want = run(host, options);
  expect_close(got.y, want.y, 1e-6, "y");
  for (size_t i = 0; i < want.gradients.size(); ++i) {
    expect_close(got.gradients[i], want.gradients[i], 4e-6, "gradient " + std::to_string(i));
  }
  expect_close(device.running_mean, host.running_mean, 1e-6, "running_mean");
  expect_close(device.running_var, host.running_var, 1e-6, "running_var");
  EXPECT_EQ(fake::peek(device.num_batches).item<int>(), 7);
  EXPECT_EQ(host.num_batches.item<int>(), 7);
}

TEST_F(SyncBatchNormFake, OnlyTheWeightsGradient_IsRight) {
  const Layer host = make(at::kFloat, {5, 4, 9}, 4);
  std::vector<at::Tensor> found;
  for (const Layer& layer : {host, move(host)}) {
    layer.weight.requires_grad_();
    found.push_back(
        torch::autograd::grad({layer.forward(kDefault)}, {layer.weight}, {layer.dy})[0]);
  }
  expect_close(found[1], found[0], 1e-6, "dweight");
}

TEST_F(SyncBatchNormFake, NoElements_GiveNone) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{4, 0, 3}, std::vector<int64_t>{0, 2, 3}}) {
    Layer layer;
    layer.x = on_device(at::empty(shape));
    layer.dy = on_device(at::empty(shape));
    const Results results = run(layer, with_mirrors());
    EXPECT_EQ(results.y.sizes().vec(), shape);
    EXPECT_EQ(results.gradients[0].sizes().vec(), shape);
  }
}

TEST_F(SyncBatchNormFake, OneValueInAll_RaisesWithoutAGroup) {
  Layer layer;
  layer.x = on_device(at::ones({1, 3}));
  EXPECT_THROW(layer.forward(kDefault), apex::InvalidArgument);
}

TEST_F(SyncBatchNormFake, SecondDerivative_EqualsTheCpus) {
  for (const int ranks : {1, kWorld}) {
    const Layer host = make(at::kDouble, {4, 3, 5}, 3);
    const Layer device = move(host);
    const auto derivative = [](const Layer& layer, const SyncBatchNormOptions& options) {
      const at::Tensor x = layer.x.requires_grad_();
      const at::Tensor y = layer.forward(options);
      const at::Tensor dx = torch::autograd::grad({y}, {x}, {layer.dy}, true, true)[0];
      return torch::autograd::grad({dx.pow(2).sum()}, {x})[0];
    };
    const SyncBatchNormOptions options = ranks > 1 ? with_mirrors(ranks) : kDefault;
    const at::Tensor want = derivative(host.whole(ranks), kDefault).narrow(0, 0, 4);
    expect_close(derivative(device, options), want, 1e-12, "second derivative");
  }
}

TEST_F(SyncBatchNormFake, CapturedStep_Replays_EqualTheCpus) {
  for (const bool rows : {false, true}) {
    const auto shape = rows ? std::vector<int64_t>{40, 6} : std::vector<int64_t>{4, 6, 9};
    Layer device = move(make(at::kFloat, shape, 6));
    const SyncBatchNormOptions options = with_mirrors();
    run(device, options);
    fake::Graph graph;
    graph.begin(fake::current_stream());
    const Results results = run(device, options);
    graph.end();
    EXPECT_EQ(graph.errors(), Strings{});
    EXPECT_EQ(graph.size(), 2u * 3) << "two launches and a collective each way";
    for (int step = 0; step < 3; ++step) {
      fake::host_alias(device.x.detach()).copy_(at::randn(shape));
      fake::host_alias(device.dy).copy_(at::randn(shape));
      Layer host = device;
      for (at::Tensor* tensor : host.all()) {
        if (tensor->defined()) *tensor = fake::peek(tensor->detach());
      }
      graph.replay();
      Layer whole = host.whole(kWorld);
      const Results want = run(whole, kDefault);
      expect_close(results.y, want.y.narrow(0, 0, shape[0]), 1e-6, "y");
      expect_close(results.gradients[0], want.gradients[0].narrow(0, 0, shape[0]), 1e-6, "dx");
      expect_close(results.gradients[1], want.gradients[1].div(kWorld), 1e-6, "dweight");
      expect_close(device.running_var, whole.running_var, 1e-6, "running_var");
      EXPECT_EQ(fake::peek(device.num_batches).item<int64_t>(), whole.num_batches.item<int64_t>());
    }
  }
}

}  // namespace
}  // namespace apex::testing
