// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <functional>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <apex/error.h>
#include <apex/parallel/distributed_data_parallel.h>
#include <apex/parallel/overlapped_optimizer.h>
#include <support/thread_backend.h>

namespace apex::parallel {
namespace {

using apex::testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kSteps = 9;  // the plan is recorded in the first and ordered after the third

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("fc" + std::to_string(i), torch::nn::Linear(6, 6)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      if (before) before(*layer);
      x = torch::tanh(layer(x));
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  std::function<void(const torch::nn::Module&)> before;
};
TORCH_MODULE(Net);

DistributedDataParallelOptions options_for(const Group& group, bool views) {
  return DistributedDataParallelOptions(group).limits({1}).gradient_as_bucket_view(views);
}

Net make() {
  static std::mutex mutex;  // the seed is per process, and ranks are threads
  const std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(0);
  return Net();
}

at::Tensor batch(int rank, int step) {
  return torch::sin(torch::arange(24).to(at::kFloat).view({4, 6}) * (step + 1) + 3 * rank);
}

template <typename Optimizer, typename Model>
void train(Model& model, Optimizer& optimizer, torch::optim::SGD& sgd, int rank) {
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    model.forward(batch(rank, step)).square().mean().backward();
    optimizer.step();
    // Like a scheduler, before the remaining updates.
    static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[0].options()).lr(0.5 / (step + 2));
  }
}

class OverlappedOptimizerTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(CopiesAndViews, OverlappedOptimizerTest, ::testing::Bool());

TEST_P(OverlappedOptimizerTest, Parameters_AreThoseOfThePlainLoopBitForBit) {
  run_ranks(2, [&](int rank, const Group& group) {
    Net net = make();
    DistributedDataParallel plain(make(), options_for(group, GetParam()));
    torch::optim::SGD plain_sgd(plain.parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
    train(plain, plain_sgd, plain_sgd, rank);

    DistributedDataParallel model(net, options_for(group, GetParam()));
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.5).momentum(0.9));
    {
      OverlappedOptimizer optimizer(sgd, model.reducer());
      net->before = [&](const torch::nn::Module& module) { optimizer.wait_for(module); };
      train(model, optimizer, sgd, rank);
      EXPECT_GE(model.reducer().statistics().deferred, kSteps - 4);
      EXPECT_FALSE(model.reducer().in_flight().empty());
    }  // makes the remaining updates
    net->before = nullptr;
    EXPECT_TRUE(model.reducer().in_flight().empty());
    for (size_t i = 0; i < plain.parameters().size(); ++i) {
      EXPECT_TRUE(model.parameters()[i].equal(plain.parameters()[i])) << i;
    }
    // The reducer's settings are restored.
    const int64_t deferred = model.reducer().statistics().deferred;
    model.forward(batch(rank, 0)).square().mean().backward();
    EXPECT_EQ(model.reducer().statistics().deferred, deferred);
  });
}

TEST(OverlappedOptimizerCpp, SecondOneOfAReducer_Throws_UntilTheFirstIsGone) {
  run_ranks(2, [](int, const Group& group) {
    DistributedDataParallel model(make(), options_for(group, false));
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.5));
    for (int i = 0; i < 2; ++i) {
      OverlappedOptimizer optimizer(sgd, model.reducer());
      try {
        OverlappedOptimizer second(sgd, model.reducer());
        ADD_FAILURE() << "it was not refused";
      } catch (const InvalidArgument& error) {
        EXPECT_NE(std::string(error.what()).find("already has an OverlappedOptimizer"),
                  std::string::npos);
      }
      EXPECT_TRUE(model.reducer().deferred());
    }
    EXPECT_FALSE(model.reducer().deferred());
  });
}

TEST_P(OverlappedOptimizerTest, ForwardThatDoesNotWait_NextBackward_Throws) {
  run_ranks(2, [&](int rank, const Group& group) {
    Net net = make();
    DistributedDataParallel model(net, options_for(group, GetParam()));
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.5));
    OverlappedOptimizer optimizer(sgd, model.reducer());
    EXPECT_THROW(train(model, optimizer, sgd, rank), std::exception);
  });
}

TEST_P(OverlappedOptimizerTest, GroupAddedWhileUpdatesAreInFlight_Throws) {
  run_ranks(2, [&](int rank, const Group& group) {
    Net net = make();
    DistributedDataParallel model(net, options_for(group, GetParam()));
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.5));
    OverlappedOptimizer optimizer(sgd, model.reducer());
    net->before = [&](const torch::nn::Module& module) { optimizer.wait_for(module); };
    train(model, optimizer, sgd, rank);
    EXPECT_FALSE(model.reducer().in_flight().empty());
    const at::Tensor added = torch::ones({3}, at::requires_grad());
    sgd.add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{added}));
    try {
      optimizer.synchronize();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("call synchronize() first"), std::string::npos)
          << error.what();
    }
    sgd.param_groups().pop_back();
    optimizer.synchronize();
    net->before = nullptr;
  });
}

TEST_P(OverlappedOptimizerTest, SavedWithUpdatesInFlight_Archive_HoldsTheStateAfterThem) {
  run_ranks(2, [&](int rank, const Group& group) {
    static std::mutex one_at_a_time;  // torch's archives are not thread safe
    Net net = make();
    DistributedDataParallel model(net, options_for(group, GetParam()));
    const auto momentum = torch::optim::SGDOptions(0.5).momentum(0.9);
    torch::optim::SGD sgd(model.parameters(), momentum);
    OverlappedOptimizer optimizer(sgd, model.reducer());
    net->before = [&](const torch::nn::Module& module) { optimizer.wait_for(module); };
    train(model, optimizer, sgd, rank);
    ASSERT_FALSE(model.reducer().in_flight().empty());
    std::stringstream stream;
    {
      const std::lock_guard<std::mutex> lock(one_at_a_time);
      torch::save(optimizer, stream);
    }
    EXPECT_TRUE(model.reducer().in_flight().empty());
    torch::optim::SGD loaded(net->parameters(), momentum);
    {
      const std::lock_guard<std::mutex> lock(one_at_a_time);
      torch::load(loaded, stream);
    }
    for (const at::Tensor& parameter : net->parameters()) {
      const auto momentum_in = [&](torch::optim::SGD& from) {
        return static_cast<torch::optim::SGDParamState&>(
                   *from.state().at(parameter.unsafeGetTensorImpl()))
            .momentum_buffer();
      };
      EXPECT_TRUE(momentum_in(loaded).equal(momentum_in(sgd)));
    }
    net->before = nullptr;
  });
}

TEST_P(OverlappedOptimizerTest, GradientClearedByOthers_Synchronize_ThrowsNamingIt) {
  run_ranks(2, [&](int rank, const Group& group) {
    Net net = make();
    DistributedDataParallel model(net, options_for(group, GetParam()));
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.5));
    OverlappedOptimizer optimizer(sgd, model.reducer());
    net->before = [&](const torch::nn::Module& module) { optimizer.wait_for(module); };
    train(model, optimizer, sgd, rank);
    ASSERT_FALSE(model.reducer().in_flight().empty());
    // Gradients that are reduced in place; views appear once all buckets are complete.
    model.zero_grad();
    try {
      optimizer.synchronize();
      EXPECT_TRUE(GetParam());
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("OverlappedOptimizer::zero_grad()"),
                std::string::npos);
    }
    net->before = nullptr;
  });
}

}  // namespace
}  // namespace apex::parallel
