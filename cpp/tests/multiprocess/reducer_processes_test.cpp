// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>

#include <apex/distributed.h>
#include <apex/error.h>
#include <apex/parallel/reducer.h>
#include <apex/parallel/sync_batch_norm.h>
#include <support/processes.h>
#include <support/toy_model.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

// The reducer on real processes over Gloo, compared with one process on the whole batch in float64.

namespace {

using apex::parallel::Reducer;
using apex::parallel::ReducerOptions;
using apex::parallel::SyncBatchNormImpl;
using apex::testing::require;
using apex::testing::ToyModel;

bool flag(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && std::string(value) == "1";
}

void train() {
  const auto group = apex::distributed::init_process_group("gloo");
  const int rank = group->getRank();
  const int world = group->getSize();
  const at::ScalarType dtype = flag("TEST_BFLOAT16") ? at::kBFloat16 : at::kFloat;
  ToyModel model = ToyModel::mlp({6, 300, 300, 3}, 10 + rank, dtype);
  ReducerOptions options;
  options.limits.cap = 1000;
  options.gradient_as_bucket_view = flag("TEST_VIEWS");
  Reducer reducer(model.parameters, {group}, options);
  ToyModel reference = ToyModel::mlp({6, 300, 300, 3}, 10, dtype).clone(at::kDouble);
  for (int step = 0; step < 4; ++step) {
    const at::Tensor batch = apex::testing::random_batch(12, 6, step);
    model.zero_grad();
    reducer.prepare_for_forward();
    const at::Tensor y = model.forward(apex::testing::rows_of_rank(batch, rank, world));
    reducer.watch_outputs({y});
    y.to(at::kFloat).square().mean().backward();
    reference.zero_grad();
    reference.forward(batch).square().mean().backward();
    for (size_t i = 0; i < model.size(); ++i) {
      const double error = apex::testing::relative_error(model[i].grad(), reference[i].grad());
      require(error < (dtype == at::kFloat ? 2e-5 : 0.1), "step " + std::to_string(step) + ", " +
                                                              model.parameters[i].name +
                                                              ": error " + std::to_string(error));
    }
    model.sgd_step(1e-3);
    // The reference follows the model, so that rounding errors do not accumulate.
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < model.size(); ++i) reference[i].copy_(model[i]);
  }
  require(reducer.statistics().launched_in_backward > 0, "nothing overlapped");

  // Bitwise the same on every rank.
  for (size_t i = 0; i < model.size(); ++i) {
    std::vector<at::Tensor> mine{model[i].detach().to(at::kFloat).contiguous()};
    std::vector<std::vector<at::Tensor>> all(1);
    for (int r = 0; r < world; ++r) all[0].push_back(at::empty_like(mine[0]));
    group->allgather(all, mine)->wait();
    for (int r = 0; r < world; ++r) require(all[0][r].equal(mine[0]), "ranks differ");
  }
  apex::distributed::destroy_process_group();
}

const apex::testing::Scenario kTrain("reducer_train", train);

/// Nothing is sent in between, so a rank may destroy the reducer while others still connect.
void connect_and_drop() {
  const auto group = apex::distributed::init_process_group("gloo");
  const ToyModel model = ToyModel::mlp({3, 3}, 1);
  ReducerOptions options;
  options.init_sync = false;
  for (int i = 0; i < 100; ++i) Reducer(model.parameters, {group}, options);
  apex::distributed::destroy_process_group();
}

const apex::testing::Scenario kConnectAndDrop("reducer_connect_and_drop", connect_and_drop);

/// Two layers of the same size that ranks run in different orders; only their names differ.
void swapped_layers() {
  const auto group = apex::distributed::init_process_group("gloo");
  torch::nn::Sequential layers(torch::nn::BatchNorm1d(3), torch::nn::BatchNorm1d(3));
  apex::parallel::convert_sync_batch_norm(*layers, group);
  if (group->getRank() == 1) {
    layers =
        torch::nn::Sequential(layers->ptr<SyncBatchNormImpl>(1), layers->ptr<SyncBatchNormImpl>(0));
  }
  std::string text;
  try {
    layers->forward(at::rand({4, 3}));
  } catch (const apex::RankMismatch& error) {
    text = error.what();
  }
  require(text.find("forward of SyncBatchNorm '0' of 3 channels") != std::string::npos &&
              text.find("forward of SyncBatchNorm '1' of 3 channels") != std::string::npos,
          "no mismatch, or without names: " + text);
  apex::distributed::destroy_process_group();
}

const apex::testing::Scenario kSwappedLayers("sync_batch_norm_swapped_layers", swapped_layers);

/// Without a group: over all ranks, or over none if requested.
void default_ranks_of_batch_norm() {
  const auto group = apex::distributed::init_process_group("gloo");
  const int rank = group->getRank();
  const at::Tensor all = at::arange(24, at::kFloat).view({8, 3}).square();
  const at::Tensor mine = all.narrow(0, 4 * rank, 4);
  const auto normalized = [](const at::Tensor& x, const at::Tensor& by) {
    return (x - by.mean(0)) / (by.var(0, false) + 1e-5).sqrt();
  };
  torch::nn::Sequential layers(torch::nn::BatchNorm1d(3));
  apex::parallel::convert_sync_batch_norm(*layers);
  apex::parallel::SyncBatchNorm alone(
      apex::parallel::SyncBatchNormOptions(3).this_rank_alone(true));
  for (int step = 0; step < 2; ++step) {
    require(at::allclose(apex::parallel::SyncBatchNorm(3)(mine), normalized(mine, all), 1e-4, 1e-5),
            "a layer normalizes by one rank");
    require(at::allclose(layers->forward(mine), normalized(mine, all), 1e-4, 1e-5),
            "a converted one does");
    require(at::allclose(alone(mine), normalized(mine, mine), 1e-4, 1e-5),
            "one on its own does not");
  }
  apex::distributed::destroy_process_group();
}

const apex::testing::Scenario kDefaultRanks("sync_batch_norm_default_ranks",
                                            default_ranks_of_batch_norm);

}  // namespace

namespace apex::testing {
namespace {

TEST(SyncBatchNormProcesses, NoGroup_Forward_NormalizesOverAllRanks) {
  EXPECT_EQ(failures_of(run_processes(ranks_of("sync_batch_norm_default_ranks", 2))), "");
}

TEST(SyncBatchNormProcesses, LayersInAnotherOrder_Forward_ThrowsWithBothNames) {
  EXPECT_EQ(failures_of(run_processes(ranks_of("sync_batch_norm_swapped_layers", 2))), "");
}

class ReducerProcesses : public ::testing::TestWithParam<std::tuple<int, bool, bool>> {};

TEST_P(ReducerProcesses, Training_OverGloo_EqualsTheWholeBatchAndKeepsRanksEqual) {
  const auto [world, views, bfloat16] = GetParam();
  EXPECT_EQ(failures_of(run_processes(ranks_of(
                "reducer_train", world,
                {{"TEST_VIEWS", views ? "1" : "0"}, {"TEST_BFLOAT16", bfloat16 ? "1" : "0"}}))),
            "");
}

INSTANTIATE_TEST_SUITE_P(Table, ReducerProcesses,
                         ::testing::Values(std::tuple(3, false, false), std::tuple(2, true, true)));

TEST(ReducerProcessesConnection, DroppedAtOnceByOneRank_Others_ConnectAllTheSame) {
  EXPECT_EQ(failures_of(run_processes(ranks_of("reducer_connect_and_drop", 3))), "");
}

}  // namespace
}  // namespace apex::testing
