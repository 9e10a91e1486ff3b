// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/variable.h>

#include <apex/error.h>
#include <apex/parallel/comm_hook.h>
#include <apex/parallel/reducer.h>
#include <support/fake_device.h>
#include <support/fake_group.h>
#include <support/toy_model.h>

// The reducer and streams, without a GPU. Accesses of different streams to the same memory must be
// ordered by events, memory must be kept alive for the streams that use it, and the host must not
// wait. Values cannot show this, since operators run immediately; fake::detector() checks it.

namespace apex::testing {
namespace {

using parallel::NamedTensor;
using parallel::Reducer;
using parallel::ReducerOptions;
using Accumulator =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Strings = std::vector<std::string>;

const std::vector<int64_t> kWidths{6, 20, 20, 20, 3};

at::TensorOptions on_device() { return at::device(fake::device()); }

int64_t host_waits() { return static_cast<int64_t>(fake::detector().host_waits().size()); }

/// Host waits after the first `before`.
Strings host_waits_since(int64_t before) {
  const Strings all = fake::detector().host_waits();
  return {all.begin() + before, all.end()};
}

/// How gradients are stored, and the number of ranks; a single rank sends nothing.
struct Setting {
  bool views;
  int world;
};

class FakeDeviceReducer : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    fake::detector().reset();
    options_.gradient_as_bucket_view = GetParam().views;
    options_.limits.cap = 50;
  }
  void TearDown() override {
    if (expects_errors_) return;
    EXPECT_EQ(fake::detector().errors(), Strings{});
  }

  /// Expects the detector's first error to contain `part`.
  void expect_error(const std::string& part) {
    expects_errors_ = true;
    const Strings errors = fake::detector().errors();
    ASSERT_FALSE(errors.empty()) << "nothing was found";
    EXPECT_NE(errors.front().find(part), std::string::npos) << errors.front();
  }

  ReducerOptions options_;
  const int world_ = GetParam().world;
  const Group group_ = fake::make_mirror_group(world_, "wire");
  bool expects_errors_ = false;
};

/// A model with the same batches on all ranks, so that averages are its own gradients, next to a
/// float64 reference on the CPU.
struct Training {
  ToyModel model = ToyModel::mlp(kWidths, 1).clone(on_device());
  ToyModel reference = ToyModel::mlp(kWidths, 1).clone(at::kDouble);
  std::vector<at::Tensor> batches;
  std::vector<at::Tensor> device_batches;

  explicit Training(int steps) {
    for (int step = 0; step < steps; ++step) {
      batches.push_back(random_batch(12, 6, step));
      device_batches.push_back(batches.back().to(fake::device()));
    }
  }

  void backward(Reducer& reducer, int step) {
    model.zero_grad();
    reference.zero_grad();
    reducer.prepare_for_forward();
    const at::Tensor y = model.forward(device_batches[step]);
    reducer.watch_outputs({y});
    y.square().mean().backward();
    reference.forward(batches[step]).square().mean().backward();
  }

  void expect_gradients(double tolerance) {
    for (size_t i = 0; i < model.size(); ++i) {
      EXPECT_LT(relative_error(fake::peek(model[i].grad()), reference[i].grad()), tolerance)
          << model.parameters[i].name;
    }
  }

  void optimizer_step() {
    model.sgd_step(0.1);
    reference.sgd_step(0.1);
  }
};

TEST_P(FakeDeviceReducer, SumsThatAreClearedInPlace_AreToldFromSumsThatAreKept) {
  if (world_ == 1) GTEST_SKIP() << "one rank sums nothing";
  options_.gradient_average = false;
  ToyModel model = ToyModel::mlp(kWidths, 1).clone(on_device());
  Reducer reducer(model.parameters, {group_}, options_);
  const auto backward = [&] {
    reducer.prepare_for_forward();
    const at::Tensor y = model.forward(random_batch(12, 6, 1).to(fake::device()));
    reducer.watch_outputs({y});
    y.square().mean().backward();
  };
  backward();
  const at::Tensor once = fake::peek(model[0].grad()).clone();
  for (size_t i = 0; i < model.size(); ++i) {
    // As _foreach_zero_ on a GPU does, it leaves the version as it is.
    const at::AutoDispatchBelowADInplaceOrView guard;
    model[i].grad().zero_();
  }
  backward();
  EXPECT_LT(relative_error(fake::peek(model[0].grad()), once), 1e-6);
  EXPECT_THROW(backward(), std::runtime_error);
}

TEST_P(FakeDeviceReducer, EveryOption_HasNoRace_AndTheHostWaitsOnlyWhereItMust) {
  using Groups = std::vector<Group>;
  struct Case {
    const char* name;
    void (*set)(ReducerOptions&, Groups&);
    bool waits = false;
    at::ScalarType dtype = at::kFloat;
    double tolerance = 2e-5;
  };
  const std::vector<Case> cases{
      {"default", [](ReducerOptions&, Groups&) {}},
      {"delay_allreduce", [](ReducerOptions& o, Groups&) { o.delay_allreduce = true; }},
      {"predivide", [](ReducerOptions& o, Groups&) { o.gradient_predivide_factor = 2; }},
      {"one bucket", [](ReducerOptions& o, Groups&) { o.limits.cap = 1 << 20; }},
      {"trigger", [](ReducerOptions& o, Groups&) { o.trigger_parameters = {2, 4}; }},
      {"static_graph", [](ReducerOptions& o, Groups&) { o.static_graph = true; }},
      {"check_finite", [](ReducerOptions& o, Groups&) { o.check_finite = true; }, true},
      // A single rank has no rank to compare with.
      {"check_steps", [](ReducerOptions& o, Groups&) { o.check_steps = true; }, world_ > 1},
      {"summed in float32", [](ReducerOptions& o, Groups&) { o.allreduce_always_fp32 = true; },
       false, at::kBFloat16, 0.05},
      {"several groups",
       [](ReducerOptions&, Groups& groups) {
         for (const char* name : {"wire 1", "wire 2"})
           groups.push_back(fake::make_mirror_group(groups[0]->getSize(), name));
       }},
      {"compressed", [](ReducerOptions&, Groups&) {}, false, at::kFloat, 0.01},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    ReducerOptions options = options_;
    Groups groups{group_};
    each.set(options, groups);
    Training training(3);
    for (auto& parameter : training.model.parameters)
      parameter.tensor = parameter.tensor.detach().to(each.dtype).requires_grad_();
    Reducer reducer(training.model.parameters, groups, options);
    if (each.name == std::string("compressed"))
      reducer.set_comm_hook(parallel::make_compress_hook(group_, at::kHalf));
    int64_t before = 0;
    for (int step = 0; step < 3; ++step) {
      training.backward(reducer, step);
      training.expect_gradients(each.tolerance);
      if (each.dtype == at::kFloat) training.optimizer_step();
      if (step == 0) before = host_waits();
    }
    // In the first step, it records the plan together with the other ranks.
    EXPECT_EQ(host_waits() > before, each.waits);
    EXPECT_EQ(fake::detector().errors(), Strings{});
    const auto buckets = static_cast<int64_t>(reducer.plan()->buckets.size());
    if (each.name == std::string("default")) {
      EXPECT_GE(buckets, 3);
      EXPECT_EQ(reducer.statistics().launched_in_backward, buckets * 2);
    }
  }
}

TEST_P(FakeDeviceReducer, ParameterWithoutGradient_IsAllTheHostWaitsFor) {
  ToyModel model = ToyModel::mlp(kWidths, 1).clone(on_device());
  Reducer reducer(model.parameters, {group_}, options_);
  const at::Tensor x = at::ones({2, 6}, on_device());
  int64_t before = 0;
  for (int step = 0; step < 4; ++step) {
    model.zero_grad();
    reducer.prepare_for_forward();
    at::Tensor y = at::addmm(model[1], x, model[0].t());
    if (step < 2) y = at::addmm(model[3], y, model[2].t());
    y = at::addmm(model[5], y, model[4].t());
    y = at::addmm(model[7], y, model[6].t());
    reducer.watch_outputs({y});
    y.sum().backward();
    EXPECT_EQ(model[2].grad().defined(), step < 2);
    if (step == 1) before = host_waits();
  }
  EXPECT_GT(reducer.plan()->buckets.size(), 2U);
  EXPECT_EQ(reducer.statistics().usage_reads, 2);  // one per backward, for any number of buckets
  EXPECT_EQ(host_waits() - before, world_ > 1 ? 2 : 0);
}

// Another rank may use what no rank has used so far.
TEST_P(FakeDeviceReducer, ParameterThatNoRankUsed_ReportsAreRead) {
  for (const bool unused : {true, false}) {
    ToyModel model = ToyModel::mlp(kWidths, 1).clone(on_device());
    Reducer reducer(model.parameters, {group_}, options_);
    int64_t before = 0;
    for (int step = 0; step < 2; ++step) {
      before = host_waits();
      reducer.prepare_for_forward();
      const at::Tensor x = at::ones({2, 6}, on_device());
      const at::Tensor y = unused ? at::addmm(model[1], x, model[0].t()) : model.forward(x);
      reducer.watch_outputs({y});
      y.sum().backward();
    }
    EXPECT_EQ(host_waits() > before, unused && world_ > 1);
  }
}

// A rank without data follows the others' reports. Without reading them, the others could discard a
// plan that it still uses.
TEST_P(FakeDeviceReducer, UnderJoin_ReportsAreRead) {
  if (world_ == 1) GTEST_SKIP() << "nothing is sent";
  Training training(8);
  Reducer reducer(training.model.parameters, {group_}, options_);
  const auto waits_in_step = [&](int step) {
    const int64_t before = host_waits();
    training.backward(reducer, step);
    training.expect_gradients(2e-5);
    return host_waits() - before;
  };
  for (int step = 0; step < 3; ++step) training.backward(reducer, step);
  EXPECT_EQ(waits_in_step(3), 0);
  reducer.begin_join(/*divide_by_initial_world_size=*/true);
  EXPECT_GT(waits_in_step(4), 0);
  reducer.end_join({});
  EXPECT_EQ(waits_in_step(5), 0);
}

/// Operations that a reducer adds to a backward in which `unused` of 20 parameters are not used.
int64_t operations_added(const Group& group, const ReducerOptions& options, size_t unused) {
  std::vector<NamedTensor> parameters;
  for (int i = 0; i < 20; ++i)
    parameters.push_back({"p" + std::to_string(i), at::ones({8}, on_device()).requires_grad_()});
  const auto backward = [&](Reducer* reducer, size_t skipped) {
    for (auto& parameter : parameters) parameter.tensor.mutable_grad() = at::Tensor();
    if (reducer != nullptr) reducer->prepare_for_forward();
    at::Tensor loss = at::zeros({}, on_device());
    for (size_t i = skipped; i < parameters.size(); ++i) loss = loss + parameters[i].tensor.sum();
    if (reducer != nullptr) reducer->watch_outputs({loss});
    const int64_t before = fake::detector().operations();
    loss.backward();
    return fake::detector().operations() - before;
  };
  const int64_t alone = backward(nullptr, unused);
  Reducer reducer(parameters, {group}, options);
  for (int step = 0; step < 3; ++step) backward(&reducer, 0);
  return backward(&reducer, unused) - alone;
}

TEST_P(FakeDeviceReducer, ParametersWithoutGradient_CostNoOperationsEach) {
  options_.limits.cap = 1 << 20;
  EXPECT_EQ(operations_added(group_, options_, 10), operations_added(group_, options_, 2));
  // A copy into the bucket, a copy back, the sum, and the report.
  if (world_ > 1) {
    EXPECT_LE(operations_added(group_, options_, 0), GetParam().views ? 4 : 5);
  }
}

TEST_P(FakeDeviceReducer, GradientsAfterBackward_AreReadyOnTheCallersStreamOnly) {
  Training training(3);
  Reducer reducer(training.model.parameters, {group_}, options_);
  const c10::Stream main = fake::current_stream();
  const c10::Stream caller = fake::new_stream("caller");
  fake::order(main, caller);
  {
    const c10::StreamGuard guard(caller);
    for (int step = 0; step < 3; ++step) {
      training.backward(reducer, step);
      training.expect_gradients(2e-5);
      training.optimizer_step();
    }
  }
  EXPECT_EQ(fake::detector().errors(), Strings{});
  const c10::StreamGuard guard(fake::new_stream("other"));
  training.model[0].grad().add(1);
  expect_error("aten::add on stream 'other' reads what ");
}

/// A backward of `training` that fails halfway, after the buckets of the last layers were launched.
void fail_backward(
    Training& training, Reducer& reducer, const std::function<void()>& first_of_all = [] {}) {
  training.model.zero_grad();
  reducer.prepare_for_forward();
  const at::Tensor first = at::addmm(training.model[1], training.device_batches[0].to(at::kFloat),
                                     training.model[0].t());
  first.register_hook([&](const at::Tensor&) {
    first_of_all();
    throw std::runtime_error("no gradient today");
  });
  at::Tensor y = first;
  for (size_t i = 2; i < training.model.size(); i += 2) {
    y = at::addmm(training.model[i + 1], y, training.model[i].t());
  }
  reducer.watch_outputs({y});
  EXPECT_THROW(y.sum().backward(), std::runtime_error);
}

TEST_P(FakeDeviceReducer, BackwardThatFails_LeavesMemoryToThoseThatUseIt) {
  for (const int hook : {0, 1}) {
    SCOPED_TRACE(hook);
    Training training(3);
    Reducer reducer(training.model.parameters, {group_}, options_);
    if (hook == 1) reducer.set_comm_hook(parallel::make_compress_hook(group_, at::kHalf));
    training.backward(reducer, 0);
    training.backward(reducer, 1);
    const int64_t launched = reducer.statistics().launched_in_backward;
    fail_backward(training, reducer);
    EXPECT_GT(reducer.statistics().launched_in_backward, launched);
    training.model.zero_grad();
    at::ones({4}, on_device());  // reuses the memory of buffers and gradients
    training.backward(reducer, 2);
    EXPECT_EQ(fake::detector().errors(), Strings{});
  }
}

// Fails if the stream that ends backward does not register its use of a buffer made by a hook.
TEST_P(FakeDeviceReducer, BuffersMadeOnAnotherStream_AreKeptForTheStreamThatCalledBackward) {
  // After a failed backward, the hook that packs the first gradient allocates new buffers, on the
  // stream on which gradients are accumulated. This is the stream on which the reducer was
  // constructed.
  Training training(3);
  Reducer reducer(training.model.parameters, {group_}, options_);
  const c10::Stream main = fake::current_stream();
  const c10::Stream caller = fake::new_stream("caller");
  fake::order(main, caller);
  {
    const c10::StreamGuard guard(caller);
    training.backward(reducer, 0);
    training.backward(reducer, 1);
    fail_backward(training, reducer);
    training.backward(reducer, 2);
    training.optimizer_step();
    training.model.zero_grad();
    reducer.rebuild_buckets();
  }
  at::ones({4}, on_device());
}

/// Parameters whose gradients are produced on separate streams. Parameter 0's comes last, so its
/// stream launches.
class SideStreams {
 public:
  SideStreams(int count, int64_t numel) : main_(fake::current_stream()) {
    for (int i = 0; i < count; ++i) {
      streams.push_back(fake::new_stream("side " + std::to_string(i)));
      parameters.push_back(
          {"p" + std::to_string(i), at::ones({numel}, on_device()).requires_grad_()});
    }
    for (int i = 0; i < count; ++i) {
      // A gradient is accumulated on the stream on which its accumulator was created.
      fake::order(main_, streams[i]);
      const c10::StreamGuard guard(streams[i]);
      accumulators_.push_back(torch::autograd::impl::grad_accumulator(parameters[i].tensor));
    }
  }

  static double factor(int step, int index) { return 10 * step + index + 1; }

  void backward(Reducer& reducer, int step) {
    reducer.prepare_for_forward();
    std::vector<at::Tensor> terms;
    for (size_t i = 0; i < parameters.size(); ++i) {
      fake::order(main_, streams[i]);
      const c10::StreamGuard guard(streams[i]);
      terms.push_back((parameters[i].tensor * factor(step, static_cast<int>(i))).sum());
      terms.back().record_stream(main_);
      fake::order(streams[i], main_);
    }
    at::Tensor loss = at::zeros({}, on_device());
    for (const at::Tensor& term : terms) loss = loss + term;
    reducer.watch_outputs({loss});
    loss.backward();
  }

  void expect_gradients(int step) const {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor grad = fake::peek(parameters[i].tensor.grad());
      EXPECT_TRUE(grad.eq(factor(step, static_cast<int>(i))).all().item<bool>())
          << parameters[i].name;
    }
  }

  void zero_grad(bool in_place = false) {
    for (auto& parameter : parameters) {
      at::Tensor& grad = parameter.tensor.mutable_grad();
      if (in_place) {
        grad.zero_();
      } else {
        grad = at::Tensor();
      }
    }
  }

  /// Unrelated work of these streams, in other memory.
  void work_of_their_own() const {
    for (const c10::Stream& stream : streams) {
      const c10::StreamGuard guard(stream);
      at::ones({4}, on_device());
    }
  }

  std::vector<NamedTensor> parameters;
  std::vector<c10::Stream> streams;

 private:
  const c10::Stream main_;
  std::vector<Accumulator> accumulators_;
};

// Gradients must also be kept for the stream that packs them (where they become views of the
// bucket, their old memory is free), and for the stream that called backward (while recording).
TEST_P(FakeDeviceReducer, GradientsOfSideStreams_AreWaitedFor_AndKeptForTheStreamsThatUseThem) {
  // All in one bucket, two per bucket, and each in its own.
  for (const int64_t cap : {int64_t{1} << 20, int64_t{32}, int64_t{1}}) {
    SCOPED_TRACE(cap);
    options_.limits.cap = cap;
    SideStreams side(4, cap == 1 ? 1 << 15 : 16);
    Reducer reducer(side.parameters, {group_}, options_);
    int64_t before = 0;
    int64_t at_end = 0;
    for (int step = 0; step < 6; ++step) {
      side.backward(reducer, step);
      side.work_of_their_own();
      side.expect_gradients(step);
      side.zero_grad(/*in_place=*/step > 2);
      side.work_of_their_own();
      if (step > 0) continue;
      before = host_waits();
      at_end = reducer.statistics().launched_at_end;
    }
    EXPECT_EQ(host_waits_since(before), Strings{});
    EXPECT_EQ(reducer.statistics().launched_at_end, at_end);
    EXPECT_GT(reducer.statistics().launched_in_backward, 0);
    EXPECT_EQ(fake::detector().errors(), Strings{});
  }
}

/// Autograd's thread for the device may still be releasing a failed backward.
void wait_for_end_of_backward(Reducer& reducer) {
  for (;;) {
    try {
      return reducer.rebuild_buckets();
    } catch (const apex::Error&) {  // "while a backward is running"
      std::this_thread::yield();
    }
  }
}

/// The other ranks wait for the messages of a rank that has run out of memory in backward.
TEST_P(FakeDeviceReducer, BackwardThatRunsOutOfMemory_SendsAllItsMessages) {
  if (world_ == 1) GTEST_SKIP() << "nothing is sent";
  options_.limits.cap = 450;  // no bucket in place
  fake::MirrorRules rules;
  rules.issued = std::make_shared<Strings>();
  Training training(4);
  Reducer reducer(training.model.parameters, {fake::make_mirror_group(world_, "wire", rules)},
                  options_);
  training.backward(reducer, 0);
  training.backward(reducer, 1);
  rules.issued->clear();
  training.backward(reducer, 2);
  const Strings complete = *rules.issued;
  EXPECT_GT(complete.size(), 1U);
  rules.issued->clear();
  fail_backward(training, reducer, [] { fake::set_largest_block(0); });
  wait_for_end_of_backward(reducer);
  fake::set_largest_block(std::numeric_limits<size_t>::max());
  EXPECT_EQ(*rules.issued, complete);
  training.backward(reducer, 3);
  training.expect_gradients(2e-5);
}

INSTANTIATE_TEST_SUITE_P(Settings, FakeDeviceReducer,
                         ::testing::Values(Setting{false, 2}, Setting{true, 2}, Setting{false, 1},
                                           Setting{true, 1}),
                         [](const auto& info) {
                           return std::string(info.param.views ? "Views" : "Copies") +
                                  (info.param.world == 1 ? "OneRank" : "");
                         });

}  // namespace
}  // namespace apex::testing
