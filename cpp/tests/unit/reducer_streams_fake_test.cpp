// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <cmath>
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
#include <apex/parallel/detail/model_sync.h>
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

TEST_P(FakeDeviceReducer, OrdinaryTraining_HasNoRaceAndTheHostDoesNotWait) {
  constexpr int kSteps = 4;
  Training training(kSteps);
  Reducer reducer(training.model.parameters, {group_}, options_);
  int64_t before = 0;
  for (int step = 0; step < kSteps; ++step) {
    training.backward(reducer, step);
    training.expect_gradients(2e-5);
    training.optimizer_step();
    if (step == 0) before = host_waits();  // it records the plan together with the other ranks
  }
  EXPECT_EQ(host_waits_since(before), Strings{});
  const auto buckets = static_cast<int64_t>(reducer.plan()->buckets.size());
  EXPECT_GE(buckets, 3);
  EXPECT_EQ(reducer.statistics().launched_in_backward, buckets * (kSteps - 1));
}

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

TEST_P(FakeDeviceReducer, EveryOption_HasNoRace) {
  struct Case {
    const char* name;
    void (*set)(ReducerOptions&);
    bool waits;
  };
  const std::vector<Case> cases{
      {"delay_allreduce", [](ReducerOptions& options) { options.delay_allreduce = true; }, false},
      {"predivide", [](ReducerOptions& options) { options.gradient_predivide_factor = 2; }, false},
      {"one bucket", [](ReducerOptions& options) { options.limits.cap = 1 << 20; }, false},
      {"trigger", [](ReducerOptions& options) { options.trigger_parameters = {2, 4}; }, false},
      {"static_graph", [](ReducerOptions& options) { options.static_graph = true; }, false},
      {"check_finite", [](ReducerOptions& options) { options.check_finite = true; }, true},
      // A single rank has no rank to compare with.
      {"check_steps", [](ReducerOptions& options) { options.check_steps = true; }, world_ > 1},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    ReducerOptions options = options_;
    each.set(options);
    Training training(3);
    Reducer reducer(training.model.parameters, {group_}, options);
    int64_t before = 0;
    for (int step = 0; step < 3; ++step) {
      training.backward(reducer, step);
      training.expect_gradients(2e-5);
      training.optimizer_step();
      if (step == 0) before = host_waits();
    }
    EXPECT_EQ(host_waits() > before, each.waits);
    EXPECT_EQ(fake::detector().errors(), Strings{});
  }
}

TEST_P(FakeDeviceReducer, NarrowGradientsSummedWide_HaveNoRace) {
  options_.allreduce_always_fp32 = true;
  Training training(3);
  for (auto& parameter : training.model.parameters) {
    parameter.tensor = parameter.tensor.detach().to(at::kBFloat16).requires_grad_();
  }
  Reducer reducer(training.model.parameters, {group_}, options_);
  for (int step = 0; step < 3; ++step) {
    training.backward(reducer, step);
    training.expect_gradients(0.05);
  }
  EXPECT_GT(reducer.statistics().launched_in_backward, 0);
}

TEST_P(FakeDeviceReducer, SeveralGroupsInTurn_HaveNoRace) {
  std::vector<Group> groups;
  for (const char* name : {"wire 0", "wire 1", "wire 2"}) {
    groups.push_back(fake::make_mirror_group(world_, name));
  }
  Training training(3);
  Reducer reducer(training.model.parameters, groups, options_);
  int64_t before = 0;
  for (int step = 0; step < 3; ++step) {
    training.backward(reducer, step);
    training.expect_gradients(2e-5);
    training.optimizer_step();
    if (step == 0) before = host_waits();
  }
  EXPECT_GT(reducer.plan()->buckets.size(), groups.size());
  EXPECT_EQ(host_waits_since(before), Strings{});
}

TEST_P(FakeDeviceReducer, CommunicationHooks_HaveNoRaceAndTheHostDoesNotWait) {
  for (const int world : {1, 2}) {
    const Group group = fake::make_mirror_group(world, "wire");
    Training training(3);
    Reducer reducer(training.model.parameters, {group}, options_);
    reducer.set_comm_hook(parallel::make_compress_hook(group, at::kHalf));
    int64_t before = 0;
    for (int step = 0; step < 3; ++step) {
      training.backward(reducer, step);
      training.expect_gradients(0.01);
      training.optimizer_step();
      if (step == 0) before = host_waits();
    }
    EXPECT_EQ(host_waits_since(before), Strings{});
    EXPECT_GT(reducer.statistics().launched_in_backward, 0);
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

TEST_P(FakeDeviceReducer, LayerWithoutGradient_WhereverItStandsInItsMessage_HasNone) {
  for (size_t skipped = 1; skipped < 4; ++skipped) {
    ToyModel model = ToyModel::mlp({6, 20, 20, 20, 20}, 1).clone(on_device());
    Reducer reducer(model.parameters, {group_}, options_);
    for (int step = 0; step < 4; ++step) {
      model.zero_grad();
      reducer.prepare_for_forward();
      at::Tensor y = at::ones({2, 6}, on_device());
      for (size_t layer = 0; layer < 4; ++layer) {
        if (step < 2 || layer != skipped)
          y = at::addmm(model[2 * layer + 1], y, model[2 * layer].t());
      }
      reducer.watch_outputs({y});
      y.sum().backward();
      for (size_t i = 0; i < model.size(); ++i) {
        EXPECT_EQ(model[i].grad().defined(), step < 2 || i / 2 != skipped)
            << model.parameters[i].name << ", step " << step;
      }
    }
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

TEST_P(FakeDeviceReducer, GradientsOfSideStreams_AreWaitedFor) {
  // All in one bucket, two per bucket, and each in its own.
  for (const int64_t cap : {int64_t{1} << 20, int64_t{32}, int64_t{1}}) {
    SCOPED_TRACE(cap);
    options_.limits.cap = cap;
    const int64_t numel = cap == 1 ? 1 << 15 : 16;
    SideStreams side(4, numel);
    Reducer reducer(side.parameters, {group_}, options_);
    int64_t before = 0;
    int64_t at_end = 0;
    for (int step = 0; step < 6; ++step) {
      side.zero_grad(/*in_place=*/step > 3);
      side.backward(reducer, step);
      side.expect_gradients(step);
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

TEST_P(FakeDeviceReducer, GradientsOfSideStreams_AreKeptForTheStreamThatPacksThem) {
  if (!GetParam().views) GTEST_SKIP() << "gradients outlive the packing where they are copied";
  options_.limits.cap = 1 << 20;
  SideStreams side(3, 16);
  Reducer reducer(side.parameters, {group_}, options_);
  side.backward(reducer, 0);
  for (int step = 1; step < 4; ++step) {
    side.zero_grad();
    fake::detector().reset();
    side.backward(reducer, step);
    side.work_of_their_own();  // in the old memory of gradients that are now views of the bucket
    side.expect_gradients(step);
    EXPECT_EQ(fake::detector().errors(), Strings{});
  }
}

// Fails if gradients of other streams are packed (while recording) or written at the end of
// backward without being kept for the stream that called backward.
TEST_P(FakeDeviceReducer, GradientsOfSideStreams_AreKeptForTheStreamThatCalledBackward) {
  for (const int64_t cap : {int64_t{1} << 20, int64_t{1}}) {
    SCOPED_TRACE(cap);
    options_.limits.cap = cap;
    SideStreams side(3, cap == 1 ? 1 << 15 : 16);
    Reducer reducer(side.parameters, {group_}, options_);
    for (int step = 0; step < 3; ++step) {
      side.backward(reducer, step);
      side.expect_gradients(step);
      side.zero_grad();
      side.work_of_their_own();
    }
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

/// A parameter with gradients `values`, averaged over `world` mirror images.
at::Tensor averaged(const at::Tensor& values, int world, int64_t cap) {
  fake::MirrorRules rules;
  rules.backend_name = "nccl";
  const at::Tensor factor = values.to(fake::device());
  std::vector<NamedTensor> parameters{{"p", at::zeros_like(factor).requires_grad_()},
                                      {"q", at::zeros({3}, factor.options()).requires_grad_()}};
  ReducerOptions options;
  options.limits.cap = cap;
  Reducer reducer(parameters, {fake::make_mirror_group(world, "wire", rules)}, options);
  for (int step = 0; step < 2; ++step) {
    for (auto& parameter : parameters) parameter.tensor.mutable_grad() = at::Tensor();
    reducer.prepare_for_forward();
    const at::Tensor y = (parameters[0].tensor * factor).sum() + parameters[1].tensor.sum();
    reducer.watch_outputs({y});
    y.backward();
  }
  return fake::peek(parameters[0].tensor.grad());
}

// NCCL's AVG rounds 1/N to the dtype, and each value times that, before the sum.
TEST(FakeNccl, AveragesInLowPrecision_AreSumsThatAreDivided) {
  fake::detector().reset();
  struct Case {
    at::ScalarType dtype;
    int world;
    double scale;  ///< scale of the gradients
    double error;  ///< error of one gradient
  };
  const std::vector<Case> cases{{at::kBFloat16, 3, 1, 0.008}, {at::kBFloat16, 4, 1, 0},
                                {at::kBFloat16, 7, 1, 0.008}, {at::kHalf, 1024, 1e-3, 0},
                                {at::kHalf, 3, 1e-4, 0.002},  {at::kFloat, 3, 1, 2e-7},
                                {at::kFloat, 1024, 1e-30, 0}};
  for (const Case& each : cases) {
    for (const int64_t cap : {1, 1 << 20}) {
      SCOPED_TRACE(::testing::Message() << each.dtype << ", " << each.world << " ranks, " << cap);
      const at::Tensor values = at::rand({1 << 15}).add(1).mul(each.scale).to(each.dtype);
      const at::Tensor want = values.to(at::kDouble);
      const at::Tensor error = (averaged(values, each.world, cap).to(at::kDouble) - want) / want;
      EXPECT_LE(error.abs().max().item<double>(), each.error);
      EXPECT_LT(std::abs(error.mean().item<double>()), 2e-4) << "all are off in one direction";
    }
  }
}

// torch 2.15's NCCL backend may hold them for a second. They do not count as held by a program.
TEST(FakeNccl, BuffersThatTheBackendStillHolds_AreUsedAgain) {
  fake::detector().reset();
  fake::MirrorRules rules;
  rules.backend_name = "nccl2";
  rules.holds_what_it_had = true;
  const at::Tensor p = at::ones({1 << 15}, on_device()).requires_grad_();
  Reducer reducer({{"p", p}}, {fake::make_mirror_group(2, "wire", rules)}, {});
  const void* place = nullptr;
  for (int step = 0; step < 4; ++step) {
    p.mutable_grad() = at::Tensor();
    reducer.prepare_for_forward();
    const at::Tensor y = (p * (step + 1)).sum();
    reducer.watch_outputs({y});
    y.backward();
    EXPECT_TRUE(fake::peek(p.grad()).eq(step + 1).all().item<bool>()) << step;
    const void* const now = reducer.buffers().front().const_data_ptr();
    EXPECT_TRUE(step == 0 || now == place) << step;
    place = now;
  }
  EXPECT_EQ(fake::detector().errors(), Strings{});
}

/// E.g. buffers of batch norm: receiving them must not take one operation each.
TEST(FakeNccl, TensorsOfSeveralDtypes_Broadcast_ArriveInOneCopy) {
  fake::detector().reset();
  const Group group = fake::make_mirror_group(2, "wire");
  std::vector<at::Tensor> sources, targets;
  for (int i = 0; i < 12; ++i) {
    for (const at::ScalarType dtype : {at::kHalf, at::kFloat, at::kByte, at::kLong, at::kDouble}) {
      sources.push_back(at::randn({i % 4 + 1}).mul(9).to(dtype).to(fake::device()));
      targets.push_back(at::zeros_like(sources.back()));
    }
  }
  sources.push_back(at::randn({3, 4}, on_device()).t());
  targets.push_back(at::zeros({3, 4}, on_device()).t());
  parallel::broadcast_coalesced(sources, group, 0);
  const int64_t before = fake::detector().operations();
  parallel::broadcast_coalesced(targets, group, 1);
  // An empty tensor needs no operation; the transposed one is received separately.
  EXPECT_LE(fake::detector().operations() - before, 1 + 1 + 2);
  for (size_t i = 0; i < sources.size(); ++i) {
    EXPECT_TRUE(fake::peek(targets[i]).equal(fake::peek(sources[i]))) << i;
  }
  EXPECT_EQ(fake::detector().errors(), Strings{});
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
