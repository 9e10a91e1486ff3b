// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>

#include <apex/distributed.h>
#include <apex/parallel/reducer.h>
#include <cuda/cuda_support.h>

// The reducer in real processes over NCCL, all on the first GPU.

namespace {

using apex::parallel::NamedTensor;
using apex::parallel::Reducer;
using apex::parallel::ReducerOptions;
using apex::testing::require;
using apex::testing::ToyModel;

bool flag(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && std::string(value) == "1";
}

c10::intrusive_ptr<c10d::ProcessGroup> join() {
  apex::distributed::ProcessGroupOptions options;
  options.device_index(0);
  options.timeout(std::chrono::seconds(60));
  return apex::distributed::init_process_group("nccl", options);
}

void require_equal_on_all_ranks(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                const at::Tensor& tensor, const std::string& name) {
  // Bit for bit: minus the maximum of the negative is the minimum.
  std::vector<at::Tensor> extremes{
      at::stack({tensor.detach().to(at::kFloat), -tensor.detach().to(at::kFloat)})};
  c10d::AllreduceOptions maximum;
  maximum.reduceOp = c10d::ReduceOp::MAX;
  group->allreduce(extremes, maximum)->wait();
  require(extremes[0][0].equal(-extremes[0][1]), name + " differs between ranks");
}

void train() {
  const auto group = join();
  const int rank = group->getRank();
  const int world = group->getSize();
  const at::ScalarType dtype = flag("TEST_BFLOAT16") ? at::kBFloat16 : at::kFloat;
  const std::vector<int64_t> widths{6, 300, 300, 3};
  // A different seed per rank, since construction broadcasts rank 0's values.
  ToyModel model = ToyModel::mlp(widths, 10 + rank, dtype).clone(at::device(at::kCUDA));
  ToyModel reference = ToyModel::mlp(widths, 10, dtype).clone(at::kDouble);
  ReducerOptions options;
  options.limits.cap = 1000;
  options.gradient_as_bucket_view = flag("TEST_VIEWS");
  Reducer reducer(model.parameters, {group}, options);
  for (int step = 0; step < 4; ++step) {
    const at::Tensor batch = apex::testing::random_batch(12, 6, step);
    model.zero_grad();
    reference.zero_grad();
    reducer.prepare_for_forward();
    const at::Tensor y =
        model.forward(apex::testing::rows_of_rank(batch, rank, world).to(at::kCUDA));
    reducer.watch_outputs({y});
    y.to(at::kFloat).square().mean().backward();
    reference.forward(batch).square().mean().backward();
    for (size_t i = 0; i < model.size(); ++i) {
      const double error =
          apex::testing::relative_error(model[i].grad().cpu(), reference[i].grad());
      require(error < (dtype == at::kFloat ? 2e-5 : 0.1), "step " + std::to_string(step) + ", " +
                                                              model.parameters[i].name +
                                                              ": error " + std::to_string(error));
    }
    model.sgd_step(1e-3);
    // The reference follows the model, so that rounding errors do not accumulate.
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < model.size(); ++i) reference[i].copy_(model[i]);
  }
  require(reducer.statistics().launched_in_backward > 0, "nothing overlapped");
  for (size_t i = 0; i < model.size(); ++i) {
    require_equal_on_all_ranks(group, model[i], model.parameters[i].name);
  }
  apex::distributed::destroy_process_group();
}

/// Both ranks' float32 gradients are 3e38: their sum overflows, so the average is finite only if it
/// is taken while summing. (float16 is summed, then divided: Note [Averages in low precision].)
void average_by_nccl() {
  const auto group = join();
  constexpr float kLarge = 3e38F;
  for (const bool average : {true, false}) {
    std::vector<NamedTensor> parameters;
    for (const int64_t numel : {100, 7}) {
      parameters.push_back({"p" + std::to_string(numel),
                            at::zeros({numel}, at::device(at::kCUDA)).requires_grad_()});
    }
    ReducerOptions options;
    options.gradient_average = average;
    Reducer reducer(parameters, {group}, options);
    for (int step = 0; step < 2; ++step) {  // the first records the plan, the second uses it
      at::Tensor loss = at::zeros({}, at::device(at::kCUDA));
      for (auto& parameter : parameters) {
        parameter.tensor.mutable_grad() = at::Tensor();
        loss = loss + (parameter.tensor * kLarge).sum();
      }
      reducer.watch_outputs({loss});
      loss.backward();
      for (const auto& parameter : parameters) {
        const double value = parameter.tensor.grad().max().item<double>();
        require(average ? value == static_cast<double>(kLarge) : std::isinf(value),
                parameter.name + ", step " + std::to_string(step) + ": got " +
                    std::to_string(value) + (average ? ", not the average" : ", not the sum"));
      }
    }
  }
  apex::distributed::destroy_process_group();
}

/// Rank 1 does not use the second parameter in odd steps; no rank uses the third.
void unused_on_one_rank() {
  const auto group = join();
  const int rank = group->getRank();
  std::vector<NamedTensor> parameters;
  for (const char* name : {"always", "sometimes", "never"}) {
    parameters.push_back({name, at::ones({10}, at::device(at::kCUDA)).requires_grad_()});
  }
  Reducer reducer(parameters, {group}, {});
  for (int step = 0; step < 4; ++step) {
    for (auto& parameter : parameters) parameter.tensor.mutable_grad() = at::Tensor();
    at::Tensor loss = (parameters[0].tensor * (rank + 1.0)).sum();
    const bool left_out = step % 2 == 1 && rank == 1;
    if (!left_out) loss = loss + (parameters[1].tensor * (rank + 1.0)).sum();
    reducer.watch_outputs({loss});
    loss.backward();
    const std::string at_step = " in step " + std::to_string(step);
    require(parameters[0].tensor.grad()[0].item<double>() == 1.5, "always" + at_step);
    require(parameters[1].tensor.grad().defined(), "sometimes: no gradient" + at_step);
    require(parameters[1].tensor.grad()[0].item<double>() == (step % 2 == 1 ? 0.5 : 1.5),
            "sometimes" + at_step);
    require(!parameters[2].tensor.grad().defined(), "never: got a gradient" + at_step);
  }
  apex::distributed::destroy_process_group();
}

const apex::testing::Scenario kTrain("cuda_train", train);
const apex::testing::Scenario kAverage("cuda_average_by_nccl", average_by_nccl);
const apex::testing::Scenario kUnused("cuda_unused_on_one_rank", unused_on_one_rank);

}  // namespace

namespace apex::testing {
namespace {

std::string run_on_one_gpu(const std::string& scenario, int world,
                           const std::map<std::string, std::string>& environment = {}) {
  return failures_of(
      run_processes(ranks_on_one_gpu(scenario, world, environment), nccl_run_options()));
}

class NcclReducer : public ::testing::TestWithParam<std::tuple<int, bool, bool>> {};

TEST_P(NcclReducer, Training_OverNccl_EqualsTheWholeBatchAndKeepsRanksEqual) {
  APEX_REQUIRE_GPU();
  const auto [world, views, bfloat16] = GetParam();
  EXPECT_EQ(
      run_on_one_gpu("cuda_train", world,
                     {{"TEST_VIEWS", views ? "1" : "0"}, {"TEST_BFLOAT16", bfloat16 ? "1" : "0"}}),
      "");
}

INSTANTIATE_TEST_SUITE_P(Table, NcclReducer,
                         ::testing::Values(std::tuple(2, false, false), std::tuple(2, true, false),
                                           std::tuple(2, false, true), std::tuple(3, true, false)));

TEST(NcclReducerAverage, Float16SumOverflows_NcclComputesTheAverage) {
  APEX_REQUIRE_GPU();
  EXPECT_EQ(run_on_one_gpu("cuda_average_by_nccl", 2), "");
}

TEST(NcclReducerUsage, ParameterUnusedOnOneRank_IsAveragedWithZeros) {
  APEX_REQUIRE_GPU();
  EXPECT_EQ(run_on_one_gpu("cuda_unused_on_one_rank", 2), "");
}

}  // namespace
}  // namespace apex::testing
