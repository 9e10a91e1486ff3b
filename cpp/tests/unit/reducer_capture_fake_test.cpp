// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <apex/parallel/comm_hook.h>
#include <apex/parallel/reducer.h>
#include <support/fake_capture.h>
#include <support/fake_device.h>
#include <support/fake_group.h>
#include <support/toy_model.h>

// A complete training step as a graph. The fake device reports what a GPU would refuse to capture,
// and replays train like the plain loop.

namespace apex::testing {
namespace {

using parallel::Reducer;
using parallel::ReducerOptions;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Strings = std::vector<std::string>;

constexpr int kWorld = 2;
constexpr double kLearningRate = 0.1;
const std::vector<int64_t> kWidths{6, 20, 20, 20, 3};

/// Trains a model on the fake device by replaying one step, next to its float64 reference on the
/// CPU. All ranks have the same batches, so averages equal the model's own gradients.
class CapturedTraining {
 public:
  CapturedTraining() : guard_(fake::new_stream("training")) {
    model = ToyModel::mlp(kWidths, 1).clone(fake::device());
    batch_ = at::zeros({12, 6}, at::device(fake::device()));
  }

  void warm_up(Reducer& reducer, int steps) {
    for (int step = 0; step < steps; ++step) {
      take_batch(step);
      run_step(reducer);
      reference_step(step);
    }
  }

  void capture(Reducer& reducer) {
    take_batch(0);
    const int64_t waits = static_cast<int64_t>(fake::detector().host_waits().size());
    std::vector<at::Tensor> values;
    for (auto& parameter : model.parameters) values.push_back(fake::peek(parameter.tensor));
    graph.begin(fake::current_stream());
    run_step(reducer);
    graph.end();
    EXPECT_EQ(static_cast<int64_t>(fake::detector().host_waits().size()), waits);
    // The fake device also runs captured operations, unlike a GPU.
    for (size_t i = 0; i < model.size(); ++i) fake::host_alias(model[i].detach()).copy_(values[i]);
  }

  void replay(int step) {
    fake::host_alias(batch_).copy_(random_batch(12, 6, step));
    graph.replay();
    reference_step(step);
  }

  void run_step(Reducer& reducer) {
    model.zero_grad();
    reducer.prepare_for_forward();
    const at::Tensor y = model.forward(batch_);
    reducer.watch_outputs({y});
    y.square().mean().backward();
    model.sgd_step(kLearningRate);
  }

  void expect_parameters(double tolerance) {
    for (size_t i = 0; i < model.size(); ++i) {
      EXPECT_LT(relative_error(fake::peek(model[i]), reference_[i]), tolerance)
          << model.parameters[i].name;
    }
  }

  fake::Graph graph;
  ToyModel model;

 private:
  void take_batch(int step) { batch_.copy_(random_batch(12, 6, step), /*non_blocking=*/true); }

  void reference_step(int step) {
    reference_.zero_grad();
    reference_.forward(random_batch(12, 6, step)).square().mean().backward();
    reference_.sgd_step(kLearningRate);
  }

  const c10::StreamGuard guard_;
  ToyModel reference_ = ToyModel::mlp(kWidths, 1).clone(at::kDouble);
  at::Tensor batch_;
};

struct Case {
  const char* name;
  void (*prepare)(ReducerOptions& options, std::vector<Group>& groups);
  double tolerance = 1e-5;
};

class CapturedStep : public ::testing::TestWithParam<std::tuple<bool, Case>> {
 protected:
  CapturedStep() {
    fake::detector().reset();
    options_.gradient_as_bucket_view = std::get<0>(GetParam());
    options_.limits.cap = 50;
  }
  ~CapturedStep() override { EXPECT_EQ(fake::detector().errors(), Strings{}); }

  ReducerOptions options_;
};

TEST_P(CapturedStep, Replays_TrainLikeThePlainLoop) {
  const Case& each = std::get<1>(GetParam());
  std::vector<Group> groups{fake::make_mirror_group(kWorld, "wire")};
  each.prepare(options_, groups);
  CapturedTraining training;
  Reducer reducer(training.model.parameters, groups, options_);
  const std::string name = each.name;
  if (name == "Compressed")
    reducer.set_comm_hook(parallel::make_compress_hook(groups[0], at::kHalf));
  training.warm_up(reducer, 4);
  const auto launched = reducer.statistics().launched_in_backward;
  training.capture(reducer);
  EXPECT_EQ(training.graph.errors(), Strings{});
  EXPECT_EQ(reducer.statistics().launched_in_backward > launched, !options_.delay_allreduce);
  for (int step = 4; step < 8; ++step) training.replay(step);
  training.expect_parameters(each.tolerance);
}

INSTANTIATE_TEST_SUITE_P(
    Options, CapturedStep,
    ::testing::Combine(
        ::testing::Bool(),
        ::testing::Values(Case{"Default", [](ReducerOptions&, std::vector<Group>&) {}},
                          Case{"Delayed",
                               [](ReducerOptions& options, std::vector<Group>&) {
                                 options.delay_allreduce = true;
                               }},
                          Case{"SeveralGroups",
                               [](ReducerOptions&, std::vector<Group>& groups) {
                                 groups.push_back(fake::make_mirror_group(kWorld, "wire 1"));
                                 groups.push_back(fake::make_mirror_group(kWorld, "wire 2"));
                               }},
                          Case{"Compressed", [](ReducerOptions&, std::vector<Group>&) {}, 5e-3})),
    [](const auto& tested) {
      return std::string(std::get<1>(tested.param).name) +
             (std::get<0>(tested.param) ? "Views" : "Copies");
    });

TEST(CapturedStepRefused, ParameterWithoutGradient_NeedsTheHost) {
  // The host reads whether other ranks have a gradient for it, which a graph cannot do.
  fake::detector().reset();
  CapturedTraining training;
  Reducer reducer(training.model.parameters, {fake::make_mirror_group(kWorld, "wire")}, {});
  training.warm_up(reducer, 3);
  training.graph.begin(fake::current_stream());
  training.model.zero_grad();
  reducer.prepare_for_forward();
  const at::Tensor y = at::addmm(training.model[7], at::ones({2, 20}, at::device(fake::device())),
                                 training.model[6].t());
  reducer.watch_outputs({y});
  y.sum().backward();
  training.graph.end();
  ASSERT_FALSE(training.graph.errors().empty());
  EXPECT_EQ(training.graph.errors().front().find("the host cannot know"), 0u)
      << training.graph.errors().front();
}

TEST(CapturedStepRefused, WrappedOnTheDefaultStream_AccumulatesThere) {
  fake::detector().reset();
  CapturedTraining training;
  std::unique_ptr<Reducer> reducer;
  {
    const c10::StreamGuard guard(c10::Stream(c10::Stream::DEFAULT, fake::device()));
    reducer = std::make_unique<Reducer>(training.model.parameters,
                                        std::vector<Group>{fake::make_mirror_group(kWorld, "wire")},
                                        ReducerOptions{});
  }
  training.warm_up(*reducer, 3);
  training.capture(*reducer);
  ASSERT_FALSE(training.graph.errors().empty());
  EXPECT_EQ(training.graph.errors().front(), "the default stream joins the capture");
}

// The rules of the simulated device: each mistake is reported, in the graph or by the detector.
TEST(FakeCapture, WhatAGpuWouldRefuse_IsReported) {
  using Event = c10::Event;
  struct Place {
    c10::Stream origin = fake::current_stream(), other = fake::new_stream("other");
    at::Tensor x = at::ones({3}, at::device(fake::device()));
    Event event{c10::DeviceType::PrivateUse1};
    fake::Graph graph;
    void on(const c10::Stream& stream, void (*work)(const at::Tensor&)) const {
      const c10::StreamGuard guard(stream);
      work(x);
    }
  };
  struct Mistake {
    const char* error;
    void (*captured)(Place&);
    void (*before)(Place&) = [](Place&) {};
    void (*after)(Place&) = [](Place&) {};
  };
  static constexpr auto kDoubles = [](const at::Tensor& x) { x.mul(2); };
  const std::vector<Mistake> mistakes{
      {"stream 'other' joined the capture and was not waited for",
       [](Place& p) {
         fake::order(p.origin, p.other);
         p.on(p.other, kDoubles);
       }},
      {"waits for an event from outside of the capture", [](Place& p) { p.event.block(p.origin); },
       [](Place& p) { p.event.record(p.origin); }},
      {"of a capture that has ended",
       [](Place& p) {
         p.on(p.origin, kDoubles);
         p.event.record(p.origin);
       },
       [](Place&) {}, [](Place& p) { p.event.block(p.origin); }},
      {"the host cannot know: aten::_local_scalar_dense",
       [](Place& p) { p.x.sum().item<float>(); }},
      {"the host cannot know: whether an event is over",
       [](Place& p) {
         p.event.record(p.origin);
         p.event.query();
       }},
      {"aten::mul on stream 'other' uses memory on the other side of the capture",
       [](Place& p) {
         p.x.add_(1);
         p.on(p.other, kDoubles);
       },
       [](Place& p) { fake::order(p.origin, p.other); }},
      {"on the default stream during a capture",
       [](Place& p) {
         p.on(c10::Stream(c10::Stream::DEFAULT, fake::device()),
              [](const at::Tensor&) { at::ones({2}, at::device(fake::device())); });
       }},
  };
  for (const Mistake& mistake : mistakes) {
    const c10::StreamGuard guard(fake::new_stream("origin"));
    fake::detector().reset();
    Place place;
    mistake.before(place);
    place.graph.begin(place.origin);
    mistake.captured(place);
    place.graph.end();
    mistake.after(place);
    Strings errors = place.graph.errors();
    if (errors.empty()) errors = fake::detector().errors();
    ASSERT_EQ(errors.size(), 1u) << mistake.error;
    EXPECT_NE(errors.front().find(mistake.error), std::string::npos) << errors.front();
  }
  fake::detector().reset();
}

}  // namespace
}  // namespace apex::testing
