// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <apex/error.h>
#include <apex/optim.h>
#include <support/thread_backend.h>

namespace apex::parallel {
namespace {

using apex::testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Owners = std::vector<int64_t>;

TEST(AssignOwners, MostExpensive_GoesToTheRankWithTheLeastCost) {
  EXPECT_EQ(assign_owners({10, 900, 30, 0, 500, 450}, 2), (Owners{0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(assign_owners({5, 5, 5}, 4), (Owners{0, 1, 2}));
  EXPECT_EQ(assign_owners({}, 2), Owners{});
  EXPECT_THROW(assign_owners({1}, 0), InvalidArgument);
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    wide = register_module("wide", torch::nn::Linear(7, 999));
    head = register_module("head", torch::nn::Linear(999, 3));
    frozen = register_parameter("frozen", torch::ones({5}), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::ones({4}));
    nothing = register_parameter("nothing", torch::ones({0}));
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::tanh(wide(x))); }
  torch::nn::Linear wide{nullptr}, head{nullptr};
  at::Tensor frozen, unused, nothing;
};
TORCH_MODULE(Net);

Net make(int seed) {
  static std::mutex mutex;  // the seed is per process, and ranks are threads
  const std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(seed);
  return Net();
}

/// Steps `first` to `last`, with the same gradients on every rank.
template <typename Optim>
void train(Optim& optimizer, Net& net, int first, int last) {
  for (int step = first; step < last; ++step) {
    optimizer.zero_grad(step % 2 == 0);
    const at::Tensor x = torch::sin(torch::arange(28).to(at::kFloat).view({4, 7}) * (step + 1));
    net->forward(x).square().mean().backward();
    optimizer.step();
  }
}

void expect_same(Net& left, Net& right, const std::string& what) {
  for (size_t i = 0; i < left->parameters().size(); ++i)
    EXPECT_TRUE(left->parameters()[i].equal(right->parameters()[i])) << i << ' ' << what;
}

/// Steps, saves with `saved` ranks, and loads with `loaded`. Oracle: the plain optimizer on one
/// rank, which also loads the file.
template <typename Optim, typename Options>
void expect_the_plain_one(const Options& options, int saved, int loaded) {
  Net plain_net = make(0);
  Optim plain(plain_net->parameters(), options);
  train(plain, plain_net, 0, 3);
  std::string file, weights;
  run_ranks(saved, [&](int rank, const Group& group) {
    Net net = make(rank);  // all ranks take rank 0's values
    ShardedOptimizer<Optim> optimizer(*net, group, options);
    train(optimizer, net, 0, 3);
    expect_same(net, plain_net, "before");
    const auto owned = std::count(optimizer.owners().begin(), optimizer.owners().end(), rank);
    EXPECT_LE(optimizer.optimizer().state().size(), owned);
    EXPECT_THROW(optimizer.consolidate(saved), InvalidArgument);
    optimizer.consolidate(saved - 1);
    if (rank == saved - 1) {
      EXPECT_EQ(optimizer.optimizer().state().size(), plain.state().size());
      std::ostringstream bytes, values;
      torch::save(optimizer.optimizer(), bytes);
      torch::save(net, values);
      file = bytes.str();
      weights = values.str();
    }
    optimizer.consolidate(-1);
    EXPECT_EQ(optimizer.optimizer().state().size(), plain.state().size());
  });
  train(plain, plain_net, 3, 5);
  const auto load = [](auto& into, const std::string& from) {
    std::istringstream bytes(from);
    torch::load(into, bytes);
  };
  Net net = make(1);
  load(net, weights);
  Optim other(net->parameters(), options);
  load(other, file);
  train(other, net, 3, 5);
  expect_same(net, plain_net, "plain");
  run_ranks(loaded, [&](int, const Group& group) {
    Net again = make(2);
    load(again, weights);
    ShardedOptimizer<Optim> optimizer(*again, group, options);
    load(optimizer.optimizer(), file);
    train(optimizer, again, 3, 5);
    expect_same(again, plain_net, "after");
  });
}

TEST(ShardedOptimizerCpp, ParametersAndCheckpoints_AreThoseOfThePlainOptimizerBitForBit) {
  expect_the_plain_one<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01).amsgrad(true), 3, 2);
  expect_the_plain_one<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9), 2, 3);
  expect_the_plain_one<torch::optim::SGD>(torch::optim::SGDOptions(0.1), 2, 1);
  expect_the_plain_one<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01), 1, 6);
  expect_the_plain_one<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.01), 2, 4);
}

TEST(ShardedOptimizerCpp, RanksWithOtherParameters_ThrowOnEveryRank) {
  run_ranks(2, [](int rank, const Group& group) {
    torch::nn::Linear layer(3, 4 + rank);
    EXPECT_THROW(ShardedOptimizer<torch::optim::SGD>(*layer, group, torch::optim::SGDOptions(0.1)),
                 RankMismatch);
  });
}

struct Fails : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    throw std::range_error("no more numbers");
  }
};

TEST(ShardedOptimizerCpp, StepThatThrows_FailsTheGroup) {
  run_ranks(2, [](int, const Group& group) {
    Net net = make(0);
    ShardedOptimizer<Fails> failing(*net, group, torch::optim::SGDOptions(0.1));
    ShardedOptimizer<torch::optim::SGD> other(*net, group, torch::optim::SGDOptions(0.1));
    EXPECT_THROW(failing.step(), std::range_error);
    EXPECT_EQ(failing.optimizer().param_groups().front().params().size(), 7);
    EXPECT_THROW(train(other, net, 0, 1), CommunicationError);
  });
}

}  // namespace
}  // namespace apex::parallel
