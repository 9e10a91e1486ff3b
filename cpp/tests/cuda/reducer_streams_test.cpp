// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/cuda/Sleep.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/variable.h>
#include <unistd.h>

#include <apex/distributed.h>
#include <apex/parallel/reducer.h>
#include <support/toy_model.h>

// The reducer and CUDA streams, over a group of one rank (NCCL in this process if it is built in,
// Gloo otherwise). Streams must make all waits, for every backend.

namespace apex::testing {
namespace {

using parallel::NamedTensor;
using parallel::Reducer;
using parallel::ReducerOptions;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Accumulator =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

constexpr int64_t kSleepCycles = 50'000'000;  // about 30 ms

#ifdef APEX_TEST_NCCL
constexpr const char* kBackend = "nccl";
#else
constexpr const char* kBackend = "gloo";
#endif

class CudaReducer : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() == 0) GTEST_SKIP() << "no CUDA device is visible";
    path_ = std::filesystem::temp_directory_path() /
            ("apex_cuda_reducer_" + std::to_string(::getpid()));
    std::filesystem::remove(path_);
    distributed::ProcessGroupOptions options;
    options.init_method("file://" + path_.string());
    options.rank(0);
    options.world_size(1);
    options.device_index(0);
    options.timeout(std::chrono::seconds(60));
    group_ = distributed::init_process_group(kBackend, options);
  }

  void TearDown() override {
    group_.reset();
    distributed::destroy_process_group();
    std::filesystem::remove(path_);
  }

  Group group_;
  std::filesystem::path path_;
};

/// Makes `later` wait for the work enqueued on `earlier` so far.
void order(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(at::kCUDA);
  event.record(earlier);
  event.block(later);
}

TEST_P(CudaReducer, GradientsProducedOnSideStreams_AreComplete) {
  // Parameter 0 gets its gradient last, on an idle stream. The other gradients come from streams
  // that sleep first. A bucket that is packed without waiting for these would hold the old contents
  // of their memory: the last step's gradient or nothing.
  constexpr int kParameters = 4;
  constexpr int64_t kNumel = 1 << 16;
  std::vector<c10::cuda::CUDAStream> streams;
  std::vector<NamedTensor> parameters;
  std::vector<Accumulator> accumulators;
  for (int i = 0; i < kParameters; ++i) {
    streams.push_back(c10::cuda::getStreamFromPool());
    parameters.push_back(
        {"p" + std::to_string(i), at::ones({kNumel}, at::device(at::kCUDA)).requires_grad_()});
  }
  c10::cuda::device_synchronize();
  for (int i = 0; i < kParameters; ++i) {
    // A gradient is accumulated on the stream that was current when its accumulator was created.
    const c10::cuda::CUDAStreamGuard guard(streams[i]);
    accumulators.push_back(torch::autograd::impl::grad_accumulator(parameters[i].tensor));
  }
  ReducerOptions options;
  options.gradient_as_bucket_view = GetParam();
  Reducer reducer(parameters, {group_}, options);

  const c10::cuda::CUDAStream main = c10::cuda::getCurrentCUDAStream();
  for (int step = 0; step < 3; ++step) {
    reducer.prepare_for_forward();
    at::Tensor loss = at::zeros({}, at::device(at::kCUDA));
    std::vector<at::Tensor> terms;
    for (int i = 0; i < kParameters; ++i) {
      parameters[i].tensor.mutable_grad() = at::Tensor();
      order(main, streams[i]);
      const c10::cuda::CUDAStreamGuard guard(streams[i]);
      const at::Tensor term = parameters[i].tensor * static_cast<double>(10 * step + i + 1);
      if (i > 0) {
        term.register_hook([](const at::Tensor&) { at::cuda::sleep(kSleepCycles); });
      }
      terms.push_back(term.sum());
      order(streams[i], main);
    }
    for (const at::Tensor& term : terms) loss = loss + term;
    reducer.watch_outputs({loss});
    loss.backward();
    for (int i = 0; i < kParameters; ++i) {
      const at::Tensor grad = parameters[i].tensor.grad();
      EXPECT_EQ(grad.min().item<double>(), 10 * step + i + 1) << "step " << step << ", " << i;
      EXPECT_EQ(grad.max().item<double>(), 10 * step + i + 1) << "step " << step << ", " << i;
    }
  }
  EXPECT_EQ(reducer.statistics().launched_in_backward, 2);  // of three backwards, one records
}

TEST_P(CudaReducer, BackwardCalledOnASideStream_GradientsAreReadyThere) {
  // The results are used on the stream that called backward(), without a host wait.
  ToyModel model = ToyModel::mlp({6, 300, 300, 3}, 1).clone(at::device(at::kCUDA));
  ToyModel reference = ToyModel::mlp({6, 300, 300, 3}, 1).clone(at::kDouble);
  ReducerOptions options;
  options.limits.cap = 1000;
  options.gradient_as_bucket_view = GetParam();
  Reducer reducer(model.parameters, {group_}, options);
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  for (int step = 0; step < 3; ++step) {
    const at::Tensor batch = random_batch(12, 6, step);
    model.zero_grad();
    reference.zero_grad();
    reducer.prepare_for_forward();
    const at::Tensor y = model.forward(batch.to(at::kCUDA));
    reducer.watch_outputs({y});
    y.register_hook([](const at::Tensor&) { at::cuda::sleep(kSleepCycles); });
    y.square().mean().backward();
    reference.forward(batch).square().mean().backward();
    for (size_t i = 0; i < model.size(); ++i) {
      EXPECT_LT(relative_error(model[i].grad().cpu(), reference[i].grad()), 2e-5)
          << "step " << step << ", " << model.parameters[i].name;
    }
  }
  EXPECT_GT(reducer.statistics().launched_in_backward, 0);
}

INSTANTIATE_TEST_SUITE_P(Views, CudaReducer, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Views" : "Copies"; });

}  // namespace
}  // namespace apex::testing
