// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <string>

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

// On real processes over Gloo: connections, and the ranks of batch norm. A C++ rank trains in
// python/tests/test_cpp_python_job.py.

namespace {

using apex::parallel::Reducer;
using apex::parallel::ReducerOptions;
using apex::parallel::SyncBatchNormImpl;
using apex::testing::require;
using apex::testing::ToyModel;

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

TEST(ReducerProcesses, DroppedAtOnceByOneRank_Others_ConnectAllTheSame) {
  EXPECT_EQ(failures_of(run_processes(ranks_of("reducer_connect_and_drop", 3))), "");
}

}  // namespace
}  // namespace apex::testing
