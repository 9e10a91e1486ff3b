// SPDX-License-Identifier: BSD-3-Clause
// Training with every C++ optimizer, in which one rank makes a different step than the others, or
// none does.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <apex/amp.h>
#include <apex/error.h>
#include <apex/optim.h>
#include <apex/parallel/distributed_data_parallel.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

namespace apex::parallel::optimizer_steps {
namespace {

using namespace torch::optim;
using apex::testing::random_batch;
using apex::testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

template <typename T, typename Options>
std::unique_ptr<Optimizer> make(const Tensors& parameters, const Options& options) {
  return std::make_unique<T>(parameters, options);
}

struct Kind {
  const char* name;
  std::unique_ptr<Optimizer> (*make)(const Tensors& parameters);
  bool larc = false;
  bool scales = false;
};

const Kind kKinds[] = {
    {"SGD", [](const Tensors& p) { return make<SGD>(p, SGDOptions(0.1)); }},
    {"momentum",
     [](const Tensors& p) {
       return make<SGD>(p, SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
     }},
    {"Adam", [](const Tensors& p) { return make<Adam>(p, AdamOptions(0.01)); }},
    {"AdamW", [](const Tensors& p) { return make<AdamW>(p, AdamWOptions(0.01)); }},
    {"LARC", [](const Tensors& p) { return make<SGD>(p, SGDOptions(0.1).weight_decay(0.1)); },
     true},
    {"LossScaler", [](const Tensors& p) { return make<SGD>(p, SGDOptions(0.1)); }, false, true},
    {"LossScaler of LARC", [](const Tensors& p) { return make<SGD>(p, SGDOptions(0.1)); }, true,
     true},
};

enum class Fault { kNone, kTwice, kSkip, kBeforeBackward };

constexpr int kAt = 2;  ///< the step at which rank 1 differs
constexpr int kSteps = kAt + 4;

/// The result on one rank.
struct Outcome {
  int raised_in = -1;  ///< step of the error; -1: none
  std::string error;
  Tensors parameters;
};

Outcome train(const Kind& kind, Fault fault, bool accumulates, int rank, const Group& group) {
  Outcome outcome;
  torch::nn::Sequential net(torch::nn::Linear(5, 5), torch::nn::Tanh(), torch::nn::Linear(5, 5));
  DistributedDataParallel model(net, DistributedDataParallelOptions(group)
                                         .limits({accumulates ? 1000 : 1})
                                         .gradient_as_bucket_view(!accumulates));
  const auto optimizer = kind.make(model.parameters());
  std::optional<LARC> larc;
  if (kind.larc) larc.emplace(*optimizer);
  amp::LossScaler scaler(1024.0);
  const auto backward = [&](int step, int part) {
    const at::Tensor x = random_batch(4, 5, 100 * part + 10 * step + rank).to(at::kFloat);
    const at::Tensor loss = model.forward(x).square().mean();
    (kind.scales ? scaler.scale(loss) : loss).backward();
  };
  const auto step_alone = [&] { larc ? larc->step() : optimizer->step(); };
  const auto update = [&] {
    if (kind.scales) {
      scaler.step(*optimizer, step_alone);
      scaler.update();
    } else {
      step_alone();
    }
  };
  int step = 0;
  try {
    for (; step < kSteps; ++step) {
      const Fault now = rank == 1 && step == kAt ? fault : Fault::kNone;
      model.zero_grad(/*set_to_none=*/accumulates);
      if (accumulates) {
        const auto guard = model.no_sync();
        backward(step, 1);
      }
      if (now == Fault::kBeforeBackward) update();
      backward(step, 0);
      if (now == Fault::kNone || now == Fault::kTwice) update();
      if (now == Fault::kTwice) update();
    }
  } catch (const RankMismatch& error) {
    outcome.raised_in = step;
    outcome.error = error.what();
  }
  for (const at::Tensor& one : model.parameters()) outcome.parameters.push_back(one.detach());
  return outcome;
}

TEST(OptimizerStepsCpp, StepThatOthersDidNotMake_RaisesOnEveryRank_NothingElseDoes) {
  for (const Kind& kind : kKinds) {
    for (const Fault fault : {Fault::kNone, Fault::kTwice, Fault::kSkip, Fault::kBeforeBackward}) {
      // A second step of a scaler divides the gradients by the scale once more, and moves almost
      // nothing.
      if (kind.scales && fault == Fault::kTwice) continue;
      for (const bool accumulates : {false, true}) {
        SCOPED_TRACE(std::string(kind.name) + ", fault " + std::to_string(static_cast<int>(fault)) +
                     (accumulates ? ", accumulates" : ""));
        std::vector<Outcome> ranks(accumulates ? 3 : 2);
        run_ranks(static_cast<int>(ranks.size()), [&](int rank, const Group& group) {
          ranks[rank] = train(kind, fault, accumulates, rank, group);
        });
        for (const Outcome& outcome : ranks) {
          EXPECT_EQ(outcome.raised_in, ranks[0].raised_in);
          if (fault == Fault::kNone) {
            EXPECT_EQ(outcome.error, "");
            for (size_t i = 0; i < outcome.parameters.size(); ++i)
              EXPECT_TRUE(outcome.parameters[i].equal(ranks[0].parameters[i])) << i;
            continue;
          }
          EXPECT_NE(outcome.error.find("out of step"), std::string::npos) << outcome.error;
          // In the first backward whose gradients meet those of other parameters.
          EXPECT_GE(outcome.raised_in, kAt);
          EXPECT_LE(outcome.raised_in, kAt + 1);
        }
      }
    }
  }
}

}  // namespace
}  // namespace apex::parallel::optimizer_steps
