// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <apex/amp.h>
#include <apex/error.h>
#include <apex/optim.h>
#include <apex/parallel/distributed_data_parallel.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

// Random training programs with C++ optimizers, in which one rank makes a different step than the
// others, or none does. APEX_TEST_PROGRAMS=2000 sets their number; default 200.

namespace apex::parallel::optimizer_steps {
namespace {

using apex::testing::random_batch;
using apex::testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module("fc" + std::to_string(i), torch::nn::Linear(5, 5)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) {
      x = torch::tanh(layer(x));
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Layers);

enum class Kind { kSgd, kMomentum, kAdam, kAdamW, kLarc, kScaler, kScalerLarc };
constexpr const char* kKinds[] = {"SGD",        "SGD with momentum", "Adam", "AdamW", "LARC",
                                  "LossScaler", "LossScaler of LARC"};
constexpr int kKindCount = 7;

enum class Fault { kNone, kTwice, kSkip, kBeforeBackward };
constexpr const char* kFaults[] = {"none", "steps twice", "skips a step", "steps before backward"};

/// The parameters of a case.
struct Program {
  Kind kind = Kind::kSgd;
  Fault fault = Fault::kNone;
  int world = 2;
  int rank = 0;  ///< the rank at fault
  int at = 0;    ///< the step at which it differs
  int steps = 0;
  bool views = false;
  bool set_to_none = true;
  bool accumulates = false;  ///< with a backward under no_sync() first
  int64_t cap = 1;           ///< bucket size, in elements
  double learning_rate = 0.1;
  double weight_decay = 0;

  std::string describe() const {
    std::ostringstream text;
    text << kKinds[static_cast<int>(kind)] << ", fault: " << kFaults[static_cast<int>(fault)]
         << " (rank " << rank << " of " << world << ", step " << at << " of " << steps
         << "), views " << views << ", set_to_none " << set_to_none << ", accumulates "
         << accumulates << ", cap " << cap << ", weight decay " << weight_decay;
    return text.str();
  }
};

Program program_of(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](int count) {
    return static_cast<int>(random() % static_cast<uint64_t>(count));
  };
  Program program;
  program.kind = static_cast<Kind>(below(kKindCount));
  program.fault = static_cast<Fault>(below(4));
  // A second step of a scaler divides the gradients by the scale once more, and moves almost
  // nothing.
  const bool scales = program.kind == Kind::kScaler || program.kind == Kind::kScalerLarc;
  if (scales && program.fault == Fault::kTwice) program.fault = Fault::kSkip;
  program.world = 2 + below(2);
  program.rank = below(program.world);
  program.at = below(6);
  program.steps = program.at + 4;
  program.views = below(2) == 0;
  program.set_to_none = below(2) == 0;
  program.accumulates = below(3) == 0;
  program.cap = below(2) == 0 ? 1 : 1000;
  program.weight_decay = below(2) == 0 ? 0 : 0.1;
  return program;
}

/// One rank's optimizer, of any kind.
class Stepper {
 public:
  Stepper(const Program& program, DistributedDataParallel<Layers>& model)
      : kind_(program.kind), model_(model) {
    using namespace torch::optim;
    const auto parameters = model.parameters();
    const auto sgd = SGDOptions(program.learning_rate).weight_decay(program.weight_decay);
    switch (kind_) {
      case Kind::kSgd:
      case Kind::kScaler:
        optimizer_ = std::make_unique<SGD>(parameters, sgd);
        break;
      case Kind::kMomentum:
        optimizer_ = std::make_unique<SGD>(parameters, SGDOptions(sgd).momentum(0.9));
        break;
      case Kind::kAdam:
        optimizer_ = std::make_unique<Adam>(
            parameters, AdamOptions(program.learning_rate / 10).weight_decay(program.weight_decay));
        break;
      case Kind::kAdamW:
        optimizer_ = std::make_unique<AdamW>(
            parameters,
            AdamWOptions(program.learning_rate / 10).weight_decay(program.weight_decay));
        break;
      case Kind::kLarc:
      case Kind::kScalerLarc:
        optimizer_ = std::make_unique<SGD>(parameters, sgd);
        larc_.emplace(*optimizer_);
        break;
    }
  }

  void step() {
    if (scales()) {
      scaler_.step(*optimizer_, [&] { step_alone(); });
      scaler_.update();
    } else {
      step_alone();
    }
  }
  void zero_grad(bool set_to_none) { model_.zero_grad(set_to_none); }
  at::Tensor loss(const at::Tensor& value) { return scales() ? scaler_.scale(value) : value; }

 private:
  void step_alone() {
    if (larc_) {
      larc_->step();
    } else {
      optimizer_->step();
    }
  }
  bool scales() const { return kind_ == Kind::kScaler || kind_ == Kind::kScalerLarc; }

  const Kind kind_;
  DistributedDataParallel<Layers>& model_;
  amp::LossScaler scaler_{1024.0};
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<LARC> larc_;
};

Layers make_layers(uint64_t seed) {
  static std::mutex mutex;  // the seed is per process, and ranks are threads
  const std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(seed);
  return Layers();
}

/// The result on one rank.
struct Outcome {
  int raised_in = -1;  ///< step of the error; -1: none
  std::string error;
  std::vector<at::Tensor> parameters;
};

Outcome train(const Program& program, uint64_t seed, int rank, const Group& group) {
  Outcome outcome;
  Layers net = make_layers(seed + static_cast<uint64_t>(rank));
  DistributedDataParallel<Layers> model(net, DistributedDataParallelOptions(group)
                                                 .limits({program.cap})
                                                 .gradient_as_bucket_view(program.views));
  Stepper optimizer(program, model);
  const auto backward = [&](const at::Tensor& output) {
    optimizer.loss(output.square().mean()).backward();
  };
  int step = 0;
  try {
    for (; step < program.steps; ++step) {
      const Fault fault = rank == program.rank && step == program.at ? program.fault : Fault::kNone;
      const auto x = [&](int part) {
        return random_batch(4, 5,
                            seed * 1000 + static_cast<uint64_t>(100 * part + 10 * step + rank))
            .to(at::kFloat);
      };
      optimizer.zero_grad(program.set_to_none);
      if (program.accumulates) {
        const auto guard = model.no_sync();
        backward(model.forward(x(1)));
      }
      if (fault == Fault::kBeforeBackward) optimizer.step();
      backward(model.forward(x(0)));
      if (fault != Fault::kSkip && fault != Fault::kBeforeBackward) optimizer.step();
      if (fault == Fault::kTwice) optimizer.step();
    }
  } catch (const RankMismatch& error) {
    outcome.raised_in = step;
    outcome.error = error.what();
  }
  for (const at::Tensor& parameter : model.parameters())
    outcome.parameters.push_back(parameter.detach().clone());
  return outcome;
}

void check(const Program& program, const std::vector<Outcome>& ranks) {
  const Outcome& first = ranks.front();
  for (const Outcome& outcome : ranks) {
    if (program.fault == Fault::kNone) {
      EXPECT_EQ(outcome.raised_in, -1) << outcome.error;
      for (size_t i = 0; i < outcome.parameters.size(); ++i)
        EXPECT_TRUE(outcome.parameters[i].equal(first.parameters[i])) << i;
      continue;
    }
    EXPECT_EQ(outcome.raised_in, first.raised_in);
    EXPECT_NE(outcome.error.find("out of step"), std::string::npos) << outcome.error;
    // In the first backward whose gradients meet those of other parameters.
    EXPECT_GE(outcome.raised_in, program.at);
    EXPECT_LE(outcome.raised_in, program.at + 1);
  }
}

std::vector<Outcome> run(const Program& program, uint64_t seed) {
  std::vector<Outcome> ranks(static_cast<size_t>(program.world));
  run_ranks(program.world, [&](int rank, const Group& group) {
    ranks[static_cast<size_t>(rank)] = train(program, seed, rank, group);
  });
  return ranks;
}

TEST(OptimizerStepsCpp, RandomPrograms_StepThatOthersDidNotMake_RaisesOnEveryRank_NothingElseDoes) {
  const char* const given = std::getenv("APEX_TEST_PROGRAMS");
  const uint64_t count = given != nullptr ? std::stoull(given) : 200;
  for (uint64_t seed = 0; seed < count; ++seed) {
    const Program program = program_of(seed);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + program.describe());
    check(program, run(program, seed));
  }
}

}  // namespace
}  // namespace apex::parallel::optimizer_steps
