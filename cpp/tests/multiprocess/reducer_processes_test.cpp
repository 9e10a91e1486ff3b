// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <apex/distributed.h>
#include <apex/error.h>
#include <apex/parallel/comm_hook.h>
#include <apex/parallel/detail/model_sync.h>
#include <apex/parallel/distributed_data_parallel.h>
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

/// Rank TEST_LOST exits in the middle of the third backward; the others must get an error instead
/// of waiting.
void lose_a_rank() {
  const std::string lost = std::getenv("TEST_LOST");
  apex::distributed::ProcessGroupOptions group_options;
  group_options.timeout(std::chrono::seconds(5));
  const auto group = apex::distributed::init_process_group("gloo", group_options);
  const int rank = group->getRank();
  ToyModel model = ToyModel::mlp({6, 40, 40, 3}, 1);
  ReducerOptions options;
  options.limits.cap = 1;
  Reducer reducer(model.parameters, {group}, options);
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    const at::Tensor y = model.forward(apex::testing::random_batch(4, 6, step));
    reducer.watch_outputs({y});
    if (step == 2 && std::to_string(rank) == lost) {
      y.register_hook([](const at::Tensor&) -> void { std::_Exit(0); });
    }
    try {
      y.square().mean().backward();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      require(step == 2, "too early: " + text);
      require(text.find("all-reduce of bucket") != std::string::npos &&
                  text.find("'fc") != std::string::npos,
              "the message names neither bucket nor parameter: " + text);
      // Also if it is rank 0, which hosts the store.
      require(text.find("rank " + lost + " has ended (process") != std::string::npos,
              "the message does not say which rank is lost: " + text);
      std::_Exit(0);  // the group is broken
    }
  }
  require(false, "backward() returned although a rank was gone");
}

/// Rank 0, which hosts the store, exits while rank 2 waits for rank 1, which is alive but does not
/// join. No connection that rank 2 waits on is closed.
void left_alone() {
  apex::distributed::ProcessGroupOptions group_options;
  group_options.timeout(std::chrono::seconds(60));
  const auto group = apex::distributed::init_process_group("gloo", group_options);
  const int rank = group->getRank();
  const ToyModel model = ToyModel::mlp({3, 3}, 1);
  Reducer reducer(model.parameters, {group});
  std::vector<at::Tensor> mine{at::tensor({int64_t{getpid()}})};
  std::vector<std::vector<at::Tensor>> pids(1);
  for (int r = 0; r < 3; ++r) pids[0].push_back(at::empty_like(mine[0]));
  group->allgather(pids, mine)->wait();
  if (rank == 0) std::_Exit(0);
  if (rank == 1) {
    const auto waiting = static_cast<pid_t>(pids[0][2].item<int64_t>());
    while (kill(waiting, 0) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::_Exit(0);
  }
  std::string text;
  try {
    apex::parallel::broadcast_coalesced({at::zeros({4})}, group, 1);
  } catch (const apex::CommunicationError& error) {
    text = error.what();
  }
  require(text.find("rank 0 has ended (process") != std::string::npos,
          "rank 0 is not named: " + text);
  require(text.find("rank 1 has ended") == std::string::npos, "rank 1 is blamed: " + text);
  std::_Exit(0);
}

const apex::testing::Scenario kLeftAlone("reducer_left_alone", left_alone);

const apex::testing::Scenario kLoseARank("reducer_lose_a_rank", lose_a_rank);

/// A hook over the reducer's communicator that fails for bucket TEST_BUCKET: it throws, returns no
/// future, or returns one with an error.
struct FailingHook : apex::parallel::CommHook {
  explicit FailingHook(c10::intrusive_ptr<c10d::ProcessGroup> group) : group(std::move(group)) {}
  std::string name() const override { return "failing"; }
  c10::intrusive_ptr<c10::ivalue::Future> run(apex::parallel::GradientBucket& bucket) override {
    const std::string way = std::getenv("TEST_WAY");
    auto own = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    if (fails && std::to_string(bucket.index) == std::getenv("TEST_BUCKET")) {
      if (way == "no_future") return nullptr;
      if (way == "throws") throw std::runtime_error("on purpose");
      own->setError(std::make_exception_ptr(std::runtime_error("on purpose")));
      return own;
    }
    at::Tensor buffer = bucket.buffer.div_(group->getSize());
    if (flag("TEST_BLOCKS")) {
      apex::distributed::all_reduce(buffer, c10d::ReduceOp::SUM, group);
      own->markCompleted(buffer);
      return own;
    }
    std::vector<at::Tensor> tensors{buffer};
    return group->allreduce(tensors)->getFuture()->then(
        [buffer](c10::ivalue::Future& done) {
          if (done.hasError()) std::rethrow_exception(done.exception_ptr());
          return c10::IValue(buffer);
        },
        c10::TensorType::get());
  }
  const c10::intrusive_ptr<c10d::ProcessGroup> group;
  bool fails = false;
};

std::string error_of_backward(const at::Tensor& loss) {
  try {
    loss.backward();
  } catch (const apex::Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

/// Rank 1's hook fails in the third backward while the others' hooks wait for it. Hazards: they
/// wait for the timeout, or match rank 1's next message with the hook's, in which case Gloo aborts
/// the process.
void hook_fails_on_one_rank() {
  const auto group = apex::distributed::init_process_group("gloo");
  const std::string me = "rank " + std::to_string(group->getRank()) + " of 3: ";
  const auto loss_of = [&](ToyModel& model, Reducer& reducer, int step) {
    model.zero_grad();
    reducer.prepare_for_forward();
    const at::Tensor y = model.forward(apex::testing::random_batch(4, 6, step));
    reducer.watch_outputs({y});
    return y.square().mean();
  };
  ReducerOptions options;
  options.limits.cap = 1;  // one bucket per parameter, of different sizes
  {
    ToyModel model = ToyModel::mlp({6, 40, 5, 3}, 1);
    Reducer reducer(model.parameters, {group}, options);
    const auto hook = std::make_shared<FailingHook>(reducer.communicator());
    reducer.set_comm_hook(hook);
    for (int step = 0; step < 2; ++step) loss_of(model, reducer, step).backward();
    hook->fails = group->getRank() == 1 || flag("TEST_ALL");
    const std::string text = error_of_backward(loss_of(model, reducer, 2));
    const auto says = [&](const std::string& part) {
      require(text.find(part) != std::string::npos, "'" + part + "' is not in: " + text);
    };
    says(me);
    says(std::string("communication hook 'failing', for bucket ") + std::getenv("TEST_BUCKET") +
         " (parameter 'fc");
    says(std::getenv("TEST_WAY") == std::string("no_future") ? "it returned no future"
                                                             : "on purpose");
    if (!hook->fails) says("rank 1 failed in communication hook");
    says("restart with a new process group");
    const std::string next = error_of_backward(loss_of(model, reducer, 3));
    require(next.find("restart with a new process group") != std::string::npos, next);
  }
  // All processes are alive and continue.
  ToyModel model = ToyModel::mlp({6, 3}, 1);
  Reducer reducer(model.parameters, {apex::distributed::new_group()}, options);
  loss_of(model, reducer, 4).backward();
  apex::distributed::destroy_process_group();
}

const apex::testing::Scenario kHookFails("reducer_hook_fails_on_one_rank", hook_fails_on_one_rank);

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
                         ::testing::Values(std::tuple(2, false, false), std::tuple(3, false, false),
                                           std::tuple(2, true, false), std::tuple(2, false, true)));

TEST(ReducerProcessesConnection, DroppedAtOnceByOneRank_Others_ConnectAllTheSame) {
  EXPECT_EQ(failures_of(run_processes(ranks_of("reducer_connect_and_drop", 3))), "");
}

TEST(ReducerProcessesStore, EndsWithItsRank_WhoWaitsForAnotherRank_ThrowsLongBeforeTheTimeout) {
  RunOptions options;
  options.timeout = std::chrono::seconds(40);
  EXPECT_EQ(failures_of(run_processes(ranks_of("reducer_left_alone", 3), options)), "");
}

/// How the hook fails, for which bucket, whether it blocks, whether shared memory is used, and
/// whether it fails on all ranks.
using HookFault = std::tuple<const char*, const char*, const char*, const char*, const char*>;
class ReducerProcessesHook : public ::testing::TestWithParam<HookFault> {};

TEST_P(ReducerProcessesHook, FailsOnOneRank_AllNameRankHookAndBucketAndNoneWaitsForTheTimeout) {
  const auto [way, bucket, blocks, channel, all] = GetParam();
  EXPECT_EQ(failures_of(run_processes(ranks_of("reducer_hook_fails_on_one_rank", 3,
                                               {{"TEST_WAY", way},
                                                {"TEST_BUCKET", bucket},
                                                {"TEST_BLOCKS", blocks},
                                                {"APEX_HOST_CHANNEL", channel},
                                                {"TEST_ALL", all}}))),
            "");
}

INSTANTIATE_TEST_SUITE_P(Table, ReducerProcessesHook,
                         ::testing::Values(HookFault("throws", "0", "0", "1", "0"),
                                           HookFault("throws", "0", "0", "0", "0"),
                                           HookFault("throws", "0", "1", "1", "0"),
                                           HookFault("throws", "5", "0", "0", "0"),
                                           HookFault("throws", "3", "1", "1", "0"),
                                           HookFault("no_future", "1", "0", "0", "0"),
                                           HookFault("no_future", "1", "0", "1", "1"),
                                           HookFault("future", "1", "0", "0", "0"),
                                           HookFault("throws", "5", "1", "1", "1"),
                                           HookFault("throws", "2", "0", "0", "1")));

class ReducerProcessesFailure : public ::testing::TestWithParam<int> {};

TEST_P(ReducerProcessesFailure, RankEndsInMidBackward_OthersThrowWithinTheTimeout) {
  RunOptions options;
  options.stop_at_failure = false;
  EXPECT_EQ(failures_of(run_processes(
                ranks_of("reducer_lose_a_rank", 3, {{"TEST_LOST", std::to_string(GetParam())}}),
                options)),
            "");
}

INSTANTIATE_TEST_SUITE_P(RankThatEnds, ReducerProcessesFailure, ::testing::Values(0, 1));

}  // namespace
}  // namespace apex::testing
