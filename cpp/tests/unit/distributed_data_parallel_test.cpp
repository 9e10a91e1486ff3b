// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <apex/parallel/distributed_data_parallel.h>
#include <support/thread_backend.h>

namespace {

/// A return type of a user's own.
struct Prediction {
  at::Tensor scores;
  std::string label;
};
void collect_tensors(const Prediction& prediction, std::vector<at::Tensor>& tensors) {
  tensors.push_back(prediction.scores);
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    fc1 = register_module("fc1", torch::nn::Linear(4, 8));
    bn = register_module("bn", torch::nn::BatchNorm1d(8));
    fc2 = register_module("fc2", torch::nn::Linear(8, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(torch::relu(bn(fc1(x)))); }
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
  torch::nn::BatchNorm1d bn{nullptr};
};
TORCH_MODULE(Net);

struct TwoHeads : torch::nn::Module {
  TwoHeads() { fc = register_module("fc", torch::nn::Linear(4, 2)); }
  std::tuple<at::Tensor, std::map<std::string, at::Tensor>> forward(at::Tensor x, double scale) {
    const at::Tensor y = fc(x);
    return {y * scale, {{"square", y * y}}};
  }
  torch::nn::Linear fc{nullptr};
};

}  // namespace

namespace apex::parallel {
namespace {

using apex::testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

DistributedDataParallelOptions with_group(const Group& group) {
  DistributedDataParallelOptions options;
  options.process_group = group;
  return options;
}

TEST(DistributedDataParallelCpp, Holder_Trained_KeepsRanksEqualAndFollowsTheWholeBatch) {
  run_ranks(2, [](int rank, const Group& group) {
    torch::manual_seed(rank);
    DistributedDataParallel model(Net(), with_group(group));
    model.eval();  // batch norm must not see slices here
    Net reference;
    {
      // torch's archives are not made for several threads, which ranks are here.
      static std::mutex one_at_a_time;
      const std::lock_guard<std::mutex> lock(one_at_a_time);
      std::stringstream stream;
      torch::save(model.module(), stream);
      torch::load(reference, stream);
    }
    reference->eval();
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    torch::optim::SGD reference_optimizer(reference->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor batch = at::arange(32, at::kFloat).view({8, 4}) * (0.05 * (step + 1));
      optimizer.zero_grad();
      model.forward(batch.narrow(0, 4 * rank, 4)).square().mean().backward();
      optimizer.step();
      reference_optimizer.zero_grad();
      reference->forward(batch).square().mean().backward();
      reference_optimizer.step();
    }
    const auto expected = reference->parameters();
    const auto actual = model.parameters();
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-5, 1e-6)) << i;
    }
    EXPECT_EQ(model.reducer().statistics().backwards, 3);
  });
}

TEST(DistributedDataParallelCpp,
     SharedPointerAndSeveralOutputs_Forward_ReturnsWhatTheModuleReturns) {
  run_ranks(2, [](int rank, const Group& group) {
    torch::manual_seed(0);
    DistributedDataParallel model(std::make_shared<TwoHeads>(), with_group(group));
    const auto [y, more] = model(at::full({1, 4}, rank + 1.0), 2.0);
    (y.sum() + more.at("square").sum() * 0).backward();
    EXPECT_TRUE(at::allclose(model->fc->bias.grad(), at::full({2}, 2.0)));
    EXPECT_TRUE(at::allclose(model->fc->weight.grad(), at::full({2, 4}, 3.0)));
  });
}

TEST(DistributedDataParallelCpp, NoSync_Nested_AccumulatesUntilTheOutermostEnds) {
  run_ranks(2, [](int rank, const Group& group) {
    torch::manual_seed(0);
    DistributedDataParallel model(torch::nn::Linear(4, 1), with_group(group));
    const at::Tensor x = at::full({1, 4}, rank + 1.0);
    {
      const auto outer = model.no_sync();
      {
        const auto inner = model.no_sync();
        model.forward(x).sum().backward();
      }
      model.forward(x).sum().backward();
    }
    EXPECT_TRUE(at::allclose(model->weight.grad(), at::full({1, 4}, 2.0 * (rank + 1))));
    model.forward(x).sum().backward();
    EXPECT_TRUE(at::allclose(model->weight.grad(), at::full({1, 4}, 4.5)));
  });
}

TEST(DistributedDataParallelCpp, Buffers_ByDefaultAndOnRequest_AreLeftAloneOrRankZeros) {
  run_ranks(2, [](int rank, const Group& group) {
    for (const bool broadcast : {false, true}) {
      Net net;
      net->bn->running_mean.fill_(rank + 1.0);
      DistributedDataParallelOptions options = with_group(group);
      options.broadcast_buffers = broadcast;
      DistributedDataParallel model(net, options);
      EXPECT_EQ(net->bn->running_mean[0].item<float>(), broadcast ? 1.0f : rank + 1.0f);
    }
  });
}

TEST(DistributedDataParallelCpp, NullModule_Constructed_SaysSo) {
  run_ranks(1, [](int, const Group& group) {
    DistributedDataParallelOptions options;
    options.process_group = group;
    EXPECT_THROW(DistributedDataParallel(std::shared_ptr<NetImpl>(), options), InvalidArgument);
    EXPECT_THROW(DistributedDataParallel(Net(nullptr), options), InvalidArgument);
  });
}

TEST(DistributedDataParallelCpp,
     BuffersOfOtherShapes_BroadcastOrNot_AreRefusedOnEveryRankOrLeftAlone) {
  for (const bool broadcast : {true, false}) {
    run_ranks(2, [&](int rank, const Group& group) {
      Net net;
      net->register_buffer("table", torch::full({rank + 2}, rank));
      DistributedDataParallelOptions options;
      options.process_group = group;
      options.broadcast_buffers = broadcast;
      std::string text;
      try {
        const DistributedDataParallel model(net, options);
      } catch (const RankMismatch& error) {
        text = error.what();
      }
      EXPECT_EQ(text.find("buffer 'table'") != std::string::npos, broadcast) << text;
    });
  }
}

TEST(DistributedDataParallelCpp, BufferThatChangesItsShape_Forward_ThrowsBeforeAnythingIsSent) {
  run_ranks(2, [](int rank, const Group& group) {
    Net net;
    const at::Tensor table = net->register_buffer("table", torch::full({2}, rank));
    DistributedDataParallelOptions options;
    options.process_group = group;
    options.broadcast_buffers = true;
    DistributedDataParallel model(net, options);
    EXPECT_EQ(table.sum().item<int>(), 0);
    table.resize_({3});
    EXPECT_THROW(model.forward(torch::randn({2, 4})), Error);
  });
}

TEST(DistributedDataParallelCpp, Join_UnevenBatches_EndsAlikeWithTheBuffersOfALongRank) {
  for (const bool buffers : {false, true}) {
    run_ranks(3, [&](int rank, const Group& group) {
      const int batches[] = {1, 4, 0};
      torch::manual_seed(7);
      Net net;
      auto options = with_group(group);
      options.broadcast_buffers = buffers;
      DistributedDataParallel<Net> model(net, options);
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      model.begin_join();
      for (int i = 0; i < batches[rank]; ++i) {
        model.zero_grad();
        model.forward(torch::randn({5, 4})).square().mean().backward();
        optimizer.step();
      }
      model.end_join();
      EXPECT_EQ(model.reducer().statistics().backwards, 4);
      // Counted by rank 1 alone; with broadcast_buffers the first forward took rank 0's.
      EXPECT_EQ(model->bn->num_batches_tracked.item<int64_t>(), 4);
      std::vector<at::Tensor> mine{
          torch::cat({model->fc1->weight.detach().view(-1), model->bn->running_mean.view(-1)})};
      std::vector<std::vector<at::Tensor>> all{{}};
      for (int r = 0; r < 3; ++r) all[0].push_back(torch::empty_like(mine[0]));
      group->allgather(all, mine)->wait();
      for (const at::Tensor& other : all[0]) EXPECT_TRUE(other.equal(mine[0]));
      // An even join changes nothing, and afterwards backward is as before.
      model.begin_join();
      model.end_join();
      model.forward(torch::randn({5, 4})).square().mean().backward();
      EXPECT_EQ(model.reducer().statistics().backwards, 5);
    });
  }
}

TEST(OutputTensors, NestedTypes_Collected_InOrder) {
  const at::Tensor a = at::ones({1}), b = at::ones({2}), c = at::ones({3}), d = at::ones({4});
  const auto found = output_tensors(std::make_tuple(
      std::vector<at::Tensor>{a, b}, std::optional<at::Tensor>(c), 5, std::string("text"),
      std::make_pair(Prediction{d, "label"}, std::array<at::Tensor, 1>{a})));
  ASSERT_EQ(found.size(), 5u);
  EXPECT_EQ(found[0].numel(), 1);
  EXPECT_EQ(found[1].numel(), 2);
  EXPECT_EQ(found[2].numel(), 3);
  EXPECT_EQ(found[3].numel(), 4);
}

}  // namespace
}  // namespace apex::parallel
