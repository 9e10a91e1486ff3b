// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <apex/parallel/checkpoint.h>
#include <apex/parallel/distributed_data_parallel.h>
#include <support/reducer_steps.h>
#include <support/thread_backend.h>

namespace {

/// A user-defined return type.
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

using apex::testing::expect_contains;
using apex::testing::message_of;
using apex::testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

TEST(DistributedDataParallelCpp, Holder_Trained_KeepsRanksEqualAndFollowsTheWholeBatch) {
  run_ranks(2, [](int rank, const Group& group) {
    torch::manual_seed(rank);
    DistributedDataParallel model(Net(), group);
    model.eval();  // batch norm must not see slices of the batch
    Net reference;
    {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < model.parameters().size(); ++i)
        reference->parameters()[i].copy_(model.parameters()[i]);
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
    for (size_t i = 0; i < model.parameters().size(); ++i)
      EXPECT_TRUE(at::allclose(model.parameters()[i], reference->parameters()[i], 1e-5, 1e-6));
    EXPECT_EQ(model.reducer().statistics().backwards, 3);
  });
}

TEST(DistributedDataParallelCpp,
     SharedPointerAndSeveralOutputs_Forward_ReturnsWhatTheModuleReturns) {
  run_ranks(2, [](int rank, const Group& group) {
    torch::manual_seed(0);
    DistributedDataParallel model(std::make_shared<TwoHeads>(), group);
    const auto [y, more] = model(at::full({1, 4}, rank + 1.0), 2.0);
    (y.sum() + more.at("square").sum() * 0).backward();
    EXPECT_TRUE(at::allclose(model->fc->bias.grad(), at::full({2}, 2.0)));
    EXPECT_TRUE(at::allclose(model->fc->weight.grad(), at::full({2, 4}, 3.0)));
  });
}

TEST(DistributedDataParallelCpp, NoSync_GuardsEndInAnyOrder_SynchronizesWhenNoneIsLeft) {
  run_ranks(2, [](int rank, const Group& group) {
    DistributedDataParallel model(torch::nn::Linear(4, 1), group);
    using Guard = decltype(model.no_sync());
    const at::Tensor x = at::full({1, 4}, rank + 1.0);
    std::unique_ptr<Guard> first(new Guard(model.no_sync()));
    std::unique_ptr<Guard> second(new Guard(model.no_sync()));
    first.reset();
    model.forward(x).sum().backward();
    EXPECT_TRUE(at::allclose(model->weight.grad(), x)) << "averaged while a guard lives";
    second.reset();
    model.forward(x).sum().backward();
    EXPECT_TRUE(at::allclose(model->weight.grad(), at::full({1, 4}, 3.0))) << "not averaged";
  });
}

TEST(DistributedDataParallelCpp, Weighted_UnevenBatches_IsTheMeanOverAllSamples) {
  run_ranks(3, [](int rank, const Group& group) {
    const auto data = at::arange(24, at::kDouble).view({6, 4}).sin();
    torch::nn::Linear alone(4, 1), wrapped(4, 1);
    for (torch::nn::Linear layer : {alone, wrapped}) {
      const at::NoGradGuard no_grad;
      layer->to(at::kDouble);
      layer->weight.fill_(0.5);
      layer->bias.fill_(0.25);
    }
    alone(data).square().mean().backward();
    DistributedDataParallel model(
        wrapped, DistributedDataParallelOptions(group).gradient_average(true).weighted(true));
    const at::Tensor mine = at::split_with_sizes(data, {1, 2, 3})[rank];
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      {
        const auto accumulates = model.no_sync();
        const auto weight = model.weight(static_cast<double>(mine.size(0) - 1));
        model.forward(mine.slice(0, 1)).square().sum().backward();
      }
      {
        const auto weight = model.weight(at::ones({1}, at::kLong));
        model.forward(mine.slice(0, 0, 1)).square().sum().backward();
      }
      EXPECT_EQ(model.reducer().total_weight(), 6);
      EXPECT_TRUE(at::allclose(model->weight.grad(), alone->weight.grad(), 1e-14, 1e-14));
      EXPECT_TRUE(at::allclose(model->bias.grad(), alone->bias.grad(), 1e-14, 1e-14));
    }
    EXPECT_THROW(static_cast<void>(model.weight(at::ones({2}))), InvalidArgument);
    model.zero_grad();
    EXPECT_THROW(model.forward(mine).sum().backward(), RankMismatch) << "without a weight";
  });
}

// Plain batch norm is per rank, and so may be other buffers.
TEST(DistributedDataParallelCpp, StateOfOneRankChanges_Backward_ThrowsAndNamesAParameterOnly) {
  run_ranks(3, [](int rank, const Group& group) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
    const at::Tensor table = net->register_buffer("table", at::ones({5}));
    DistributedDataParallel model(net,
                                  DistributedDataParallelOptions()
                                      .process_group(group)
                                      .check_steps(false)  // it would detect this as well
                                      .replica_check_every(2)
                                      .on_divergence(OnDivergence::kRaise));
    const auto steps = [&](int count) {
      for (int i = 0; i < count; ++i) {
        model.zero_grad();
        model.forward(at::randn({8, 4})).square().mean().backward();
      }
    };
    steps(3);
    if (rank == 2) table.data_ptr<float>()[3] = 2;
    steps(3);
    if (rank == 2) net->parameters()[0].data_ptr<float>()[0] += 1;
    expect_contains(
        message_of<RankMismatch>([&] { steps(3); }),
        "rank 2 holds a different state than the other ranks: parameter '0.weight' differs");
  });
}

TEST(DistributedDataParallelCpp, ParameterReplacedAddedOrRemoved_Forward_ThrowsAndNamesIt) {
  run_ranks(2, [](int rank, const Group& group) {
    Net net;
    DistributedDataParallel model(net, group);
    const at::Tensor x = torch::randn({2, 4});
    const auto expect_refused = [&](const std::string& part) {
      expect_contains(message_of<Error>([&] { model.forward(x); }), part);
    };
    model.to(at::kDouble);  // the same parameters
    model.forward(x.to(at::kDouble)).sum().backward();
    model.to(at::kFloat);
    net->register_module("extra", torch::nn::Linear(2, 2));
    expect_refused("'extra.weight'");
    net->unregister_module("extra");
    model.forward(x);
    net->fc2 = torch::nn::Linear(8, 2);
    net->replace_module("fc2", net->fc2);
    expect_refused("rank " + std::to_string(rank) +
                   ": parameter 'fc2.weight' was added or replaced");
    net->unregister_module("fc2");
    expect_refused("a parameter was removed");
  });
}

TEST(DistributedDataParallelCpp, Buffers_ByDefaultAndOnRequest_AreLeftAloneOrRankZeros) {
  run_ranks(2, [](int rank, const Group& group) {
    for (const bool broadcast : {false, true}) {
      const auto options = DistributedDataParallelOptions(group).broadcast_buffers(broadcast);
      Net net;
      net->bn->running_mean.fill_(rank + 1.0);
      const DistributedDataParallel model(net, options);
      EXPECT_EQ(net->bn->running_mean[0].item<float>(), broadcast ? 1.0f : rank + 1.0f);
      Net other;
      other->register_buffer("table", torch::full({rank + 2}, rank));
      const auto wrap = [&] { DistributedDataParallel(other, options); };
      if (broadcast) {
        expect_contains(message_of<RankMismatch>(wrap), "buffer 'table'");
      } else {
        wrap();
      }
    }
    Net sparse;
    sparse->register_buffer("table", torch::zeros({2, 3}).to_sparse());
    const auto options = DistributedDataParallelOptions(group).broadcast_buffers(true);
    expect_contains(message_of<InvalidArgument>([&] { DistributedDataParallel(sparse, options); }),
                    "buffer 'table' cannot be synchronized");
  });
}

TEST(DistributedDataParallelCpp, NullModule_Constructed_SaysSo) {
  run_ranks(1, [](int, const Group& group) {
    EXPECT_THROW(DistributedDataParallel(std::shared_ptr<NetImpl>(), group), InvalidArgument);
    EXPECT_THROW(DistributedDataParallel(Net(nullptr), group), InvalidArgument);
  });
  std::shared_ptr<NetImpl> pointer;
  std::unique_ptr<NetImpl> owner;
  Net holder(nullptr);
  EXPECT_THROW(Checkpoint{pointer}, InvalidArgument);
  EXPECT_THROW(Checkpoint{owner}, InvalidArgument);
  EXPECT_THROW(Checkpoint{holder}, InvalidArgument);
}

TEST(DistributedDataParallelCpp, BufferThatChangesItsShape_Forward_ThrowsBeforeAnythingIsSent) {
  run_ranks(2, [](int rank, const Group& group) {
    Net net;
    const at::Tensor table = net->register_buffer("table", torch::full({2}, rank));
    DistributedDataParallel model(net,
                                  DistributedDataParallelOptions(group).broadcast_buffers(true));
    EXPECT_EQ(table.sum().item<int>(), 0);
    table.resize_({3});
    EXPECT_THROW(model.forward(torch::randn({2, 4})), Error);
  });
}

// Hazard: a rank receives parameters when it has run out of data, so only the others have updated
// theirs. After a few such differences the check for ranks out of step would be turned off.
TEST(DistributedDataParallelCpp, Joins_UnevenBatches_EndAlike_AndLaterStepsAreCompared) {
  for (const bool buffers : {false, true}) {
    run_ranks(3, [&](int rank, const Group& group) {
      const int batches[] = {1, 4, 0};
      Net net;
      DistributedDataParallel model(
          net, DistributedDataParallelOptions(group).broadcast_buffers(buffers));
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      const auto step = [&] {
        model.zero_grad();
        model.forward(torch::randn({5, 4})).square().mean().backward();
        optimizer.step();
      };
      for (int epoch = 0; epoch < 5; ++epoch) {
        const auto guard = model.join();
        for (int i = 0; i < batches[rank]; ++i) step();
      }
      EXPECT_EQ(model.reducer().statistics().backwards, 20);
      EXPECT_EQ(model->bn->num_batches_tracked.item<int64_t>(), 20);  // of the long rank
      std::vector<at::Tensor> mine{
          torch::cat({model->fc1->weight.detach().view(-1), model->bn->running_mean.view(-1)})};
      std::vector<std::vector<at::Tensor>> all{{}};
      for (int r = 0; r < 3; ++r) all[0].push_back(torch::empty_like(mine[0]));
      group->allgather(all, mine)->wait();
      for (const at::Tensor& other : all[0]) EXPECT_TRUE(other.equal(mine[0]));
      {
        auto guard = model.join();
        EXPECT_THROW(static_cast<void>(model.join()), Error);
        guard.end();
      }
      step();
      step();
      if (rank == 1) optimizer.step();
      EXPECT_THROW(step(), RankMismatch);
    });
  }
}

TEST(DistributedDataParallelCpp, Options_Chained_ReachTheEngineOrAreRefused) {
  const auto options = DistributedDataParallelOptions()
                           .bucket_cap_mb(0.5)
                           .gradient_as_bucket_view(true)
                           .broadcast_buffers(true)
                           .check_steps(false);
  EXPECT_EQ(options.limits().cap, 512 * 1024);
  EXPECT_EQ(options.limits().first_cap, 512 * 1024);
  EXPECT_EQ(options.limits().unit, BucketLimits::Unit::kBytes);
  // The values of Python's bucket_cap_mb, python/apex/parallel/_options.py.
  const auto limits = [](double mib) {
    return DistributedDataParallelOptions().bucket_cap_mb(mib).limits();
  };
  EXPECT_EQ(limits(25).cap, 25 << 20);
  EXPECT_EQ(limits(25).first_cap, 1 << 20);
  EXPECT_EQ(limits(1e-9).cap, 1);
  for (const double mib : {1e300, std::numeric_limits<double>::infinity()})
    EXPECT_EQ(limits(mib).cap, std::numeric_limits<int64_t>::max());
  EXPECT_TRUE(options.reducer().gradient_as_bucket_view);
  EXPECT_EQ(options.reducer().check_steps, std::optional<bool>(false));
  EXPECT_TRUE(options.broadcast_buffers());
  for (const double mib : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_THROW(DistributedDataParallelOptions().bucket_cap_mb(mib), InvalidArgument);
  run_ranks(2, [](int, const Group& group) {
    // One parameter per bucket, since the first parameter that reaches the size closes its bucket.
    DistributedDataParallel model(
        Net(), DistributedDataParallelOptions(group).limits({1}).static_graph(true));
    EXPECT_TRUE(model.options().static_graph());
    model.forward(torch::randn({3, 4})).sum().backward();
    EXPECT_EQ(model.reducer().plan()->buckets.size(), model.parameters().size());
  });
}

TEST(DistributedDataParallelCpp, HoldersPointersAndVariables_Wrapped_TrainTheSameModule) {
  run_ranks(2, [](int rank, const Group& group) {
    const at::Tensor x = torch::full({2, 4}, rank + 1.0);
    const auto average_of = [&](auto& model) {
      model.forward(x).sum().backward();
      return model.parameters().front().grad();
    };
    const at::Tensor expected = torch::full({1, 4}, 3.0);
    torch::nn::Linear holder(4, 1);
    DistributedDataParallel by_holder(holder, group);
    EXPECT_TRUE(average_of(by_holder).equal(expected));
    EXPECT_TRUE(holder->weight.grad().equal(expected));
    DistributedDataParallel by_shared(std::make_shared<torch::nn::LinearImpl>(4, 1), group);
    EXPECT_TRUE(average_of(by_shared).equal(expected));
    DistributedDataParallel by_unique(std::make_unique<torch::nn::LinearImpl>(4, 1), group);
    EXPECT_TRUE(average_of(by_unique).equal(expected));
    torch::nn::LinearImpl variable(4, 1);
    DistributedDataParallel by_reference(variable, group);
    EXPECT_TRUE(average_of(by_reference).equal(expected));
    EXPECT_TRUE(variable.weight.grad().equal(expected));
    {
      const auto guard = by_reference.join();  // looks for SyncBatchNorm in the module
      by_reference.zero_grad();
      EXPECT_TRUE(average_of(by_reference).equal(expected));
    }
    torch::nn::Sequential layers(torch::nn::Linear(4, 1));
    DistributedDataParallel by_sequential(layers, group);
    EXPECT_TRUE(average_of(by_sequential).equal(expected));
  });
}

TEST(DistributedDataParallelCpp, WhatModulesOffer_ThroughTheWrapper_IsTheModules) {
  run_ranks(2, [](int rank, const Group& group) {
    Net net;
    DistributedDataParallel model(net, group);
    EXPECT_EQ(model.parameters().size(), net->parameters().size());
    EXPECT_EQ(model->named_buffers().keys(), net->named_buffers().keys());
    EXPECT_TRUE(model.parameters(/*recurse=*/false).empty());
    model.eval();
    EXPECT_FALSE(net->is_training());
    model.train();
    EXPECT_TRUE(net->bn->is_training());
    // Parameters of another dtype have hooks again after the next forward.
    model.to(torch::kFloat64);
    const at::Tensor batch = torch::randn({4, 4}, torch::kFloat64);
    model.eval();
    model.forward(batch * (rank + 1)).sum().backward();
    EXPECT_EQ(model->fc1->weight.grad().scalar_type(), torch::kFloat64);
    std::vector<at::Tensor> first{model->fc1->weight.grad().clone()};
    group->broadcast(first)->wait();
    EXPECT_TRUE(first[0].equal(model->fc1->weight.grad()));
    model.zero_grad();
    EXPECT_FALSE(model->fc1->weight.grad().defined());
  });
}

TEST(DistributedDataParallelCpp, RegisteredHook_Backward_RunsInsteadOfTheAllReduce) {
  run_ranks(2, [](int, const Group& group) {
    struct Twice : CommHook {
      c10::intrusive_ptr<c10::ivalue::Future> run(GradientBucket& bucket) override {
        EXPECT_EQ(bucket.buffer.numel(), 4 + 1) << "the gradients, and nothing else";
        auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
        future->markCompleted(bucket.buffer * 2);
        return future;
      }
    };
    DistributedDataParallel model(torch::nn::Linear(4, 1), group);
    model.register_comm_hook(std::make_shared<Twice>());
    model.forward(torch::ones({1, 4})).sum().backward();
    EXPECT_TRUE(model->weight.grad().equal(torch::full({1, 4}, 2.0)));
  });
}

TEST(DistributedDataParallelCpp, MovedFrom_AnyUse_ThrowsOurError) {
  run_ranks(2, [](int, const Group& group) {
    using Model = DistributedDataParallel<std::shared_ptr<torch::nn::LinearImpl>>;
    Model model(std::make_shared<torch::nn::LinearImpl>(4, 1), group);
    Model other = std::move(model);
    const auto save = [&] {
      std::stringstream stream;
      torch::save(model, stream);
    };
    const std::vector<std::function<void()>> uses{
        save,
        [&] { model.forward(torch::ones({1, 4})); },
        [&] { model(torch::ones({1, 4})); },
        [&] { static_cast<void>(model->weight); },
        [&] { model.parameters(); },
        [&] { model.zero_grad(); },
        [&] { model.train(); },
        [&] { model.eval(); },
        [&] { model.to(at::kDouble); },
        [&] { model.register_comm_hook(nullptr); },
        [&] { static_cast<void>(model.no_sync()); },
        [&] { static_cast<void>(model.weight(1)); },
        [&] { static_cast<void>(model.join()); },
        [&] { model.reducer(); },
    };
    for (size_t i = 0; i < uses.size(); ++i) {
      SCOPED_TRACE(i);
      expect_contains(message_of<Error>(uses[i]), "this object was moved from");
    }
    other.forward(torch::ones({1, 4})).sum().backward();
    EXPECT_TRUE(other->weight.grad().defined());
    model = std::move(other);
    EXPECT_TRUE(model.forward(torch::ones({1, 4})).defined());
    EXPECT_FALSE(other.process_group());
  });
}

TEST(DistributedDataParallelCpp, WrapperSaved_Loaded_HoldsWhatTheModuleAloneWould) {
  run_ranks(1, [](int, const Group& group) {
    DistributedDataParallel model(Net(), group);
    std::stringstream stream;
    torch::save(model, stream);
    Net alone;
    torch::load(alone, stream);
    EXPECT_TRUE(alone->fc1->weight.equal(model->fc1->weight));
    DistributedDataParallel other(Net(), group);
    stream.clear();
    stream.seekg(0);
    torch::load(other, stream);
    EXPECT_TRUE(other->fc1->weight.equal(model->fc1->weight));
  });
}

TEST(DistributedDataParallelCpp, Join_ExceptionInTheLoop_LeavesWithoutWaitingForOthers) {
  run_ranks(2, [](int, const Group& group) {
    DistributedDataParallel model(torch::nn::Linear(4, 1), group);
    EXPECT_THROW(
        {
          const auto guard = model.join();
          throw std::range_error("the user's");
        },
        std::range_error);
    model.forward(torch::ones({1, 4})).sum().backward();
    EXPECT_EQ(model.reducer().statistics().backwards, 1);
  });
}

TEST(OutputTensors, NestedTypes_Collected_InOrder) {
  const at::Tensor a = at::ones({1}), b = at::ones({2}), c = at::ones({3}), d = at::ones({4});
  const auto found = output_tensors(std::make_tuple(
      std::vector<at::Tensor>{a, b}, std::optional<at::Tensor>(c), 5, std::string("text"),
      std::make_pair(Prediction{d, "label"}, std::array<at::Tensor, 1>{a})));
  std::vector<int64_t> sizes;
  for (const at::Tensor& tensor : found) sizes.push_back(tensor.numel());
  EXPECT_EQ(sizes, (std::vector<int64_t>{1, 2, 3, 4, 1}));
}

}  // namespace
}  // namespace apex::parallel
