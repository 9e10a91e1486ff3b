// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <apex/error.h>
#include <apex/parallel/sharded_optimizer.h>
#include <support/thread_backend.h>

namespace apex::parallel {
namespace {

using apex::testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Shards = std::vector<std::vector<ParameterPiece>>;

double cost_of(const std::vector<ParameterPiece>& shard, const std::vector<int64_t>& numels,
               const std::vector<double>& costs) {
  double cost = 0;
  for (const ParameterPiece& piece : shard) {
    const auto i = static_cast<size_t>(piece.parameter);
    if (piece.end > piece.begin) {
      cost +=
          costs[i] * static_cast<double>(piece.end - piece.begin) / static_cast<double>(numels[i]);
    }
  }
  return cost;
}

/// Checks that every element is in one piece, in order.
void expect_complete(const Shards& shards, const std::vector<int64_t>& numels) {
  std::vector<int64_t> next(numels.size(), 0);
  std::vector<int> pieces(numels.size(), 0);
  for (const auto& shard : shards) {
    for (const ParameterPiece& piece : shard) {
      const auto i = static_cast<size_t>(piece.parameter);
      EXPECT_EQ(piece.begin, next[i]);
      EXPECT_TRUE(piece.end > piece.begin || numels[i] == 0);
      next[i] = piece.end;
      ++pieces[i];
    }
  }
  for (size_t i = 0; i < numels.size(); ++i) {
    EXPECT_EQ(next[i], numels[i]) << i;
    EXPECT_GE(pieces[i], 1) << i;
  }
}

TEST(AssignShards, RunsOfElements_HoldEveryElementOnceAndCostTheSame) {
  std::mt19937 random(7);
  for (int i = 0; i < 3000; ++i) {
    const auto pick = [&](int64_t most) { return static_cast<int64_t>(random() % most); };
    std::vector<int64_t> numels;
    std::vector<double> costs;
    for (int64_t p = pick(12); p >= 0; --p) {
      numels.push_back(pick(3) == 0 ? pick(200000) : pick(3000));
      costs.push_back(pick(5) == 0 ? 0.0 : static_cast<double>(numels.back()));
    }
    const int64_t ranks = 1 + pick(6);
    const Shards shards = assign_shards(numels, costs, ranks, Cut::kFew);
    ASSERT_EQ(static_cast<int64_t>(shards.size()), ranks);
    expect_complete(shards, numels);
    const double each = std::accumulate(costs.begin(), costs.end(), 0.0) / ranks;
    for (const auto& shard : shards) {
      EXPECT_LE(cost_of(shard, numels, costs), each + 4096 + 64);
      for (const ParameterPiece& piece : shard) {
        if (piece.end < numels[static_cast<size_t>(piece.parameter)]) {
          EXPECT_EQ(piece.end % 64, 0);
        }
      }
    }
  }
}

TEST(AssignShards, WholeParameters_AreNotCutAndTheDearestGoToWhoHasLeast) {
  const std::vector<int64_t> numels{10, 900, 30, 0, 500, 450};
  const Shards shards = assign_shards(numels, {}, 2, Cut::kNever);
  expect_complete(shards, numels);
  const std::vector<double> costs(numels.begin(), numels.end());
  EXPECT_EQ(cost_of(shards[0], numels, costs), 940);
  EXPECT_EQ(cost_of(shards[1], numels, costs), 950);
  // By cost, not by size.
  const Shards other = assign_shards({5, 5, 5}, {1, 1, 9}, 2, Cut::kNever);
  EXPECT_EQ(other[0].size(), 1);
  EXPECT_EQ(other[0][0].parameter, 2);
}

TEST(AssignShards, PartsOfEach_AreEqualInEveryLargeParameter) {
  std::mt19937 random(7);
  for (int i = 0; i < 500; ++i) {
    std::vector<int64_t> numels;
    for (size_t p = 1 + random() % 12; p > 0; --p)
      numels.push_back(static_cast<int64_t>(random() % (random() % 3 == 0 ? 200000 : 3000)));
    const auto ranks = static_cast<int64_t>(1 + random() % 6);
    const Shards shards = assign_shards(numels, {}, ranks, Cut::kEach);
    expect_complete(shards, numels);
    for (const auto& shard : shards) {
      for (const ParameterPiece& piece : shard) {
        const int64_t numel = numels[static_cast<size_t>(piece.parameter)];
        if (numel >= 4096) {
          EXPECT_NEAR(piece.end - piece.begin, numel / ranks, 64 * ranks);
        } else {
          EXPECT_EQ(piece.end - piece.begin, numel);
        }
      }
    }
  }
}

TEST(AssignShards, WrongArguments_Throw) {
  EXPECT_THROW(assign_shards({1, 2}, {1.0}, 2, Cut::kFew), InvalidArgument);
  EXPECT_THROW(assign_shards({1}, {-1.0}, 2, Cut::kFew), InvalidArgument);
  EXPECT_THROW(assign_shards({1}, {std::nan("")}, 2, Cut::kNever), InvalidArgument);
  EXPECT_THROW(assign_shards({1}, {}, 0, Cut::kNever), InvalidArgument);
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    wide = register_module("wide", torch::nn::Linear(7, 999));
    head = register_module("head", torch::nn::Linear(999, 3));
    frozen = register_parameter("frozen", torch::ones({5}), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::ones({4}));
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::tanh(wide(x))); }
  torch::nn::Linear wide{nullptr}, head{nullptr};
  at::Tensor frozen, unused;
};
TORCH_MODULE(Net);

Net make(int seed) {
  static std::mutex mutex;  // the seed is per process, and ranks are threads
  const std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(seed);
  return Net();
}

void backward(Net& net, int step, Reducer* reducer = nullptr) {
  const at::Tensor x = torch::sin(torch::arange(28).to(at::kFloat).view({4, 7}) * (step + 1));
  const at::Tensor loss = net->forward(x).square().mean();
  if (reducer != nullptr) reducer->watch_outputs({loss});
  loss.backward();
}

/// Oracle: the plain optimizer on one rank with the same gradients.
template <typename Optim, typename Options>
void expect_steps_of_the_plain_one(const Options& options, bool whole) {
  for (const int ranks : {1, 2, 3}) {
    Net plain_net = make(0);
    Optim plain(plain_net->parameters(), options);
    for (int step = 0; step < 4; ++step) {
      plain.zero_grad();
      backward(plain_net, step);
      plain.step();
    }
    run_ranks(ranks, [&](int rank, const Group& group) {
      Net net = make(rank);  // all ranks take rank 0's values
      std::vector<NamedTensor> named;
      for (const auto& item : net->named_parameters()) named.push_back({item.key(), item.value()});
      ShardedOptimizer<Optim> optimizer(named, group, options, {}, whole ? Cut::kNever : Cut::kFew);
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad(step % 2 == 0);
        backward(net, step);
        optimizer.step();
      }
      size_t elements = 0;
      for (const at::Tensor& tensor : optimizer.shards().tensors()) elements += tensor.numel();
      if (ranks > 1 && !whole) {
        EXPECT_LT(elements, 10993 / ranks + 4200);
      }
      for (size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TRUE(net->parameters()[i].equal(plain_net->parameters()[i])) << i << ' ' << ranks;
    });
  }
}

TEST(ShardedOptimizerCpp, Parameters_AreThoseOfThePlainOptimizerBitForBit) {
  expect_steps_of_the_plain_one<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9),
                                                   false);
  expect_steps_of_the_plain_one<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01), false);
  expect_steps_of_the_plain_one<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01), true);
}

/// Oracles: an all-reduce in the same steps; float64 for the norm.
TEST(ShardedOptimizerCpp, ReduceScatter_IsTheAverageOfTheShareAndNanElsewhere) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const bool whole : {false, true}) {
      run_ranks(ranks, [&](int rank, const Group& group) {
        Net plain_net = make(0), net = make(0);
        const auto named = [](Net& of) {
          std::vector<NamedTensor> all;
          for (const auto& item : of->named_parameters()) {
            if (item.value().requires_grad()) all.push_back({item.key(), item.value()});
          }
          return all;
        };
        ReducerOptions options;
        options.limits.cap = 2000;
        options.gradient_as_bucket_view = whole;
        Reducer plain_reducer(named(plain_net), {group}, options);
        Reducer reducer(named(net), {group}, options);
        torch::optim::SGD plain(plain_net->parameters(), torch::optim::SGDOptions(0.1));
        ShardedOptimizer<torch::optim::SGD> optimizer(
            named(net), group, torch::optim::SGDOptions(0.1), {}, whole ? Cut::kNever : Cut::kEach);
        optimizer.reduce_scatter(reducer);
        for (int step = 0; step < 4; ++step) {
          plain.zero_grad();
          optimizer.zero_grad(step % 2 == 0);
          backward(plain_net, step * ranks + rank, &plain_reducer);
          backward(net, step * ranks + rank, &reducer);
          double squares = 0;
          std::vector<at::Tensor> kept;
          for (size_t i = 0; i < net->parameters().size(); ++i) {
            const at::Tensor& grad = net->parameters()[i].grad();
            const at::Tensor& expected = plain_net->parameters()[i].grad();
            ASSERT_EQ(grad.defined(), expected.defined()) << i;
            if (!grad.defined()) continue;
            squares += expected.to(at::kDouble).square().sum().item<double>();
            kept.push_back(at::isfinite(grad));
            EXPECT_TRUE(at::allclose(grad.masked_select(kept.back()),
                                     expected.masked_select(kept.back()), 1e-5, 1e-8));
          }
          int64_t mine = 0;
          for (const at::Tensor& mask : kept) mine += mask.sum().item<int64_t>();
          int64_t stepped = 0;
          for (const at::Tensor& grad : optimizer.shards().gradients()) {
            EXPECT_TRUE(at::isfinite(grad).all().item<bool>());
            stepped += grad.numel();
          }
          EXPECT_EQ(mine, stepped);
          EXPECT_NEAR(optimizer.clip_grad_norm_(0.01).item<double>(), std::sqrt(squares),
                      1e-5 * std::sqrt(squares));
          torch::nn::utils::clip_grad_norm_(plain_net->parameters(), 0.01);
          plain.step();
          optimizer.step();
          for (size_t i = 0; i < net->parameters().size(); ++i) {
            EXPECT_TRUE(at::allclose(net->parameters()[i], plain_net->parameters()[i], 1e-5, 1e-7))
                << i << ' ' << ranks;
          }
        }
      });
    }
  }
}

TEST(ShardedOptimizerCpp, ReduceScatter_WithoutAverage_Throws) {
  run_ranks(2, [&](int, const Group& group) {
    Net net = make(0);
    ReducerOptions options;
    options.gradient_average = false;
    Reducer reducer({{"weight", net->wide->weight}}, {group}, options);
    ShardedOptimizer<torch::optim::SGD> optimizer({{"weight", net->wide->weight}}, group,
                                                  torch::optim::SGDOptions(0.1));
    EXPECT_THROW(optimizer.reduce_scatter(reducer), InvalidArgument);
  });
}

TEST(ShardedOptimizerCpp, ReduceScatter_OfParametersInNoOptimizer_Throws) {
  run_ranks(2, [&](int, const Group& group) {
    Net net = make(0);
    std::vector<NamedTensor> named{{"weight", net->wide->weight}, {"head", net->head->weight}};
    Reducer reducer(named, {group}, {});
    const auto message = [&] {
      try {
        const at::Tensor loss = net->wide->weight.sum() + net->head->weight.sum();
        reducer.watch_outputs({loss});
        loss.backward();
      } catch (const std::exception& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    {
      ShardedOptimizer<torch::optim::SGD> optimizer(std::vector<NamedTensor>{named[0]}, group,
                                                    torch::optim::SGDOptions(0.1));
      optimizer.reduce_scatter(reducer);
      EXPECT_NE(message().find("is in no ShardedOptimizer"), std::string::npos) << message();
    }
    EXPECT_NE(message().find("is in no ShardedOptimizer"), std::string::npos) << message();
    ShardedOptimizer<torch::optim::SGD> one(std::vector<NamedTensor>{named[0]}, group,
                                            torch::optim::SGDOptions(0.1));
    ShardedOptimizer<torch::optim::SGD> two(std::vector<NamedTensor>{named[1]}, group,
                                            torch::optim::SGDOptions(0.1));
    two.reduce_scatter(reducer, {&one.shards()});
    net->zero_grad();
    EXPECT_EQ(message(), "");
    for (const at::Tensor& grad : one.shards().gradients())
      EXPECT_TRUE(grad.eq(1).all().item<bool>());
    reducer.set_comm_hook(nullptr);
    EXPECT_EQ(message(), "");
  });
}

/// Saved with some ranks, loaded with others. Oracle: the plain optimizer on one rank, which steps
/// on with the same state, and loads it from the same file.
template <typename Optim, typename Options>
void expect_state_of_the_plain_one(const Options& options, bool whole, int saved, int loaded) {
  Net plain_net = make(0);
  Optim plain(plain_net->parameters(), options);
  const auto step_plain = [&](int first, int last) {
    for (int step = first; step < last; ++step) {
      plain.zero_grad();
      backward(plain_net, step);
      plain.step();
    }
  };
  const auto train = [](auto& optimizer, Net& net, int first, int last) {
    for (int step = first; step < last; ++step) {
      optimizer.zero_grad();
      backward(net, step);
      optimizer.step();
    }
  };
  const auto named = [](const Net& net) {
    std::vector<NamedTensor> result;
    for (const auto& item : net->named_parameters()) result.push_back({item.key(), item.value()});
    return result;
  };
  std::string file;
  std::vector<at::Tensor> weights;
  run_ranks(saved, [&](int rank, const Group& group) {
    Net net = make(rank);
    ShardedOptimizer<Optim> optimizer(named(net), group, options, {},
                                      whole ? Cut::kNever : Cut::kFew);
    train(optimizer, net, 0, 3);
    EXPECT_THROW(optimizer.whole(saved), InvalidArgument);
    const std::unique_ptr<Optim> state = optimizer.whole(saved - 1);
    EXPECT_EQ(state != nullptr, rank == saved - 1);
    EXPECT_NE(optimizer.whole(-1), nullptr);
    if (!state) return;
    std::ostringstream bytes;
    torch::save(*state, bytes);
    file = bytes.str();
    for (const at::Tensor& weight : net->parameters()) weights.push_back(weight.detach().clone());
  });
  step_plain(0, 3);
  {  // A plain optimizer takes the file.
    Net net = make(1);
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < weights.size(); ++i) net->parameters()[i].copy_(weights[i]);
    Optim other(net->parameters(), options);
    std::istringstream bytes(file);
    torch::load(other, bytes);
    const at::AutoGradMode grad(true);
    train(other, net, 3, 5);
    step_plain(3, 5);
    for (size_t i = 0; i < weights.size(); ++i)
      EXPECT_TRUE(net->parameters()[i].equal(plain_net->parameters()[i])) << i << " plain";
  }
  run_ranks(loaded, [&](int rank, const Group& group) {
    Net net = make(2);
    {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < weights.size(); ++i) net->parameters()[i].copy_(weights[i]);
    }
    ShardedOptimizer<Optim> optimizer(named(net), group, options, {},
                                      whole ? Cut::kNever : Cut::kFew);
    auto state = optimizer.plain();
    std::istringstream bytes(file);
    torch::load(*state, bytes);
    optimizer.load(*state);
    train(optimizer, net, 3, 5);
    for (size_t i = 0; i < weights.size(); ++i)
      EXPECT_TRUE(net->parameters()[i].equal(plain_net->parameters()[i])) << i << ' ' << rank;
  });
}

TEST(ShardedOptimizerCpp, WholeState_IsThePlainOptimizersForAnyNumberOfRanks) {
  expect_state_of_the_plain_one<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01).amsgrad(true),
                                                     false, 3, 2);
  expect_state_of_the_plain_one<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9),
                                                   false, 2, 3);
  expect_state_of_the_plain_one<torch::optim::SGD>(torch::optim::SGDOptions(0.1), false, 2, 1);
  expect_state_of_the_plain_one<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01), true, 1,
                                                       3);
  expect_state_of_the_plain_one<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.01), false, 2,
                                                       4);
}

TEST(ShardedOptimizerCpp, RanksWithOtherParameters_ThrowOnEveryRank) {
  run_ranks(2, [](int rank, const Group& group) {
    torch::nn::Linear layer(3, 4 + rank);
    EXPECT_THROW(ShardedOptimizer<torch::optim::SGD>(*layer, group, torch::optim::SGDOptions(0.1)),
                 RankMismatch);
  });
}

TEST(ShardedOptimizerCpp, SparseGradientOrMemoryWithGaps_ThrowsAndNamesTheParameter) {
  run_ranks(1, [](int, const Group& group) {
    at::Tensor weight = torch::ones({4, 2}).requires_grad_();
    ShardedOptimizer<torch::optim::SGD> optimizer({{"table", weight}}, group,
                                                  torch::optim::SGDOptions(0.1));
    weight.mutable_grad() = torch::ones({4, 2}).to_sparse();
    try {
      optimizer.step();
      ADD_FAILURE() << "a sparse gradient was stepped";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("'table' is sparse"), std::string::npos);
    }
    EXPECT_THROW(
        ParameterShards({{"one", weight}, {"view", weight.detach()[1]}}, group, {}, Cut::kFew),
        InvalidArgument);
    const at::Tensor gaps = torch::ones({4, 4}).narrow(1, 0, 2);
    EXPECT_THROW(ParameterShards({{"gaps", gaps}}, group, {}, Cut::kFew), InvalidArgument);
  });
}

// Undoes the step, also if a parameter was changed since the last step.
TEST(ParameterShardsTest, StepThatOneRankGivesUp_LeavesParametersBeforeIt) {
  for (const bool changed : {false, true}) {
    run_ranks(2, [&](int, const Group& group) {
      Net net = make(0);
      ShardedOptimizer<torch::optim::SGD> optimizer(*net, group, torch::optim::SGDOptions(0.1));
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        backward(net, step);
        optimizer.step();
      }
      const at::NoGradGuard no_grad;
      std::vector<at::Tensor> before;
      for (at::Tensor parameter : net->parameters()) {
        if (changed) parameter.add_(1);
        before.push_back(parameter.clone());
      }
      auto& shards = const_cast<ParameterShards&>(optimizer.shards());
      shards.take_gradients();
      for (at::Tensor mine : shards.tensors()) mine.mul_(3);
      shards.drop_gradients();
      shards.give_up("a test");
      for (size_t i = 0; i < before.size(); ++i)
        EXPECT_TRUE(net->parameters()[i].equal(before[i])) << i << changed;
    });
  }
}

TEST(ParameterShardsTest, MemoryThatWasReplaced_IsFoundAgain) {
  run_ranks(2, [](int, const Group& group) {
    Net net = make(0);
    Net twin = make(0);
    ShardedOptimizer<torch::optim::SGD> optimizer(*net, group, torch::optim::SGDOptions(0.1));
    torch::optim::SGD plain(twin->parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      if (step == 1) {
        for (at::Tensor parameter : net->parameters()) parameter.set_data(parameter.data().clone());
      }
      optimizer.zero_grad();
      plain.zero_grad();
      backward(net, step);
      backward(twin, step);
      optimizer.step();
      plain.step();
      for (size_t i = 0; i < twin->parameters().size(); ++i)
        EXPECT_TRUE(net->parameters()[i].equal(twin->parameters()[i])) << i << ' ' << step;
    }
    at::Tensor weight = net->wide->weight;
    weight.set_data(weight.data().to(at::kDouble));
    try {
      optimizer.step();
      ADD_FAILURE() << "another dtype was stepped";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("'wide.weight' has another dtype"),
                std::string::npos);
    }
  });
}

TEST(ParameterShardsTest, ParametersAddedLater_AreStepped_AndUndoneTogether) {
  run_ranks(2, [](int rank, const Group& group) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> all{torch::ones({9000}), torch::ones({5000}), torch::ones({7})};
    ParameterShards shards({{"a", all[0]}}, group, {}, Cut::kFew);
    shards.add({{"b", all[1]}, {"c", all[2]}}, {});
    EXPECT_THROW(shards.add({{"again", all[1]}}, {}), InvalidArgument);
    const auto step = [&] {
      shards.take_gradients();
      for (at::Tensor mine : shards.tensors()) mine.add_(2);
      shards.drop_gradients();
    };
    step();
    shards.publish();
    for (const at::Tensor& one : all) EXPECT_TRUE(one.eq(3).all().item<bool>()) << rank;
    all[1].mul_(2);
    step();
    shards.give_up("a test");
    for (size_t i = 0; i < all.size(); ++i)
      EXPECT_TRUE(all[i].eq(i == 1 ? 6 : 3).all().item<bool>()) << i << rank;
  });
}

// A step that never began changes nothing, even after an earlier step saved state.
TEST(ParameterShardsTest, GivingUpBeforeAStepBegins_ChangesNothing) {
  run_ranks(2, [](int, const Group& group) {
    const at::NoGradGuard no_grad;
    at::Tensor one = torch::ones({9000});
    ParameterShards shards({{"a", one}}, group, {}, Cut::kFew);
    one.add_(1);
    shards.take_gradients();
    shards.publish();
    one.add_(1);
    shards.give_up("a test");
    EXPECT_TRUE(one.eq(3).all().item<bool>());
  });
}

TEST(ParameterShardsTest, CostsThatDifferALittle_ThrowOnEveryRank) {
  run_ranks(2, [](int rank, const Group& group) {
    std::vector<NamedTensor> parameters{{"a", torch::ones({9000})}, {"b", torch::ones({9000})}};
    const double tiny = rank == 0 ? 1e-9 : 7e-9;
    EXPECT_THROW(ParameterShards(parameters, group, {tiny, 2e-9}, Cut::kFew), RankMismatch);
    if (rank == 0) {
      EXPECT_THROW(ParameterShards(parameters, group, {-1.0, 1.0}, Cut::kFew), InvalidArgument);
    } else {
      EXPECT_THROW(ParameterShards(parameters, group, {1.0, 1.0}, Cut::kFew), RankMismatch);
    }
  });
}

}  // namespace
}  // namespace apex::parallel
