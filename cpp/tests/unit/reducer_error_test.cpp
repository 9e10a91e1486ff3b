// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <apex/error.h>
#include <apex/parallel/reducer.h>
#include <support/reducer_steps.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

namespace apex::parallel {
namespace {

using apex::testing::relative_error;
using apex::testing::run_ranks;
using apex::testing::ThreadBackendControl;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

template <typename Exception, typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const std::exception& error) {
    EXPECT_NE(dynamic_cast<const Exception*>(&error), nullptr)
        << "another exception: " << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no exception";
  return "";
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

TEST(ReducerConstruction, ModelsThatDiffer_Construct_ThrowsOnEveryRankNamingRankAndParameter) {
  run_ranks(3, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    std::vector<NamedTensor> parameters = model.parameters;
    if (rank == 2) parameters[1].tensor = at::zeros({9}).requires_grad_();
    const std::string message =
        message_of<RankMismatch>([&] { Reducer reducer(parameters, {group}); });
    expect_contains(message, "rank 2");
    expect_contains(message, "'fc0.bias' Float [9]");
  });
}

TEST(ReducerConstruction, OptionsThatDiffer_Construct_ThrowsOnEveryRankNamingTheOption) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 2}, 1);
    ReducerOptions options;
    options.limits.cap = 100 + rank;
    const std::string message =
        message_of<RankMismatch>([&] { Reducer reducer(model.parameters, {group}, options); });
    expect_contains(message, "bucket size=100");
    expect_contains(message, "bucket size=101");
  });
}

TEST(ReducerConstruction, SettingOfOneRankOnly_Construct_ThrowsOnEveryRankNamingIt) {
  // One rank is, for example, a Python program with an option that C++ does not have.
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 2}, 1);
    ReducerOptions options;
    if (rank == 1) options.settings = {"broadcast_buffers=True"};
    const std::string message =
        message_of<RankMismatch>([&] { Reducer reducer(model.parameters, {group}, options); });
    expect_contains(
        message,
        "rank 0 was constructed without broadcast_buffers, rank 1 with broadcast_buffers=True");
  });
}

TEST(ReducerConstruction, ParametersOfAllKinds_Construct_AreRankZeros) {
  run_ranks(3, [&](int rank, const Group& group) {
    const double v = 0.1 * (rank + 1);
    std::vector<NamedTensor> parameters{
        {"float", at::full({5}, v).requires_grad_()},
        {"frozen", at::full({3}, v)},
        {"long", at::full({3}, rank + 7, at::kLong)},
    };
    Reducer reducer(parameters, {group});
    EXPECT_TRUE(parameters[0].tensor.equal(at::full({5}, 0.1)));
    EXPECT_TRUE(parameters[1].tensor.equal(at::full({3}, 0.1)));
    EXPECT_TRUE(parameters[2].tensor.equal(at::full({3}, 7, at::kLong)));
    EXPECT_TRUE(parameters[0].tensor.requires_grad());
  });
}

TEST(ReducerConstruction, InitSyncOff_Construct_LeavesParametersAlone) {
  run_ranks(2, [&](int rank, const Group& group) {
    at::Tensor p = at::full({2}, rank + 1.0).requires_grad_();
    ReducerOptions options;
    options.init_sync = false;
    Reducer reducer({{"p", p}}, {group}, options);
    EXPECT_TRUE(p.equal(at::full({2}, rank + 1.0)));
  });
}

TEST(ReducerConstruction, BadOptions_Construct_ThrowsInvalidArgument) {
  run_ranks(1, [&](int, const Group& group) {
    at::Tensor p = at::ones({2}).requires_grad_();
    auto construct = [&](auto&& change) {
      ReducerOptions options;
      change(options);
      return message_of<InvalidArgument>([&] { Reducer reducer({{"p", p}}, {group}, options); });
    };
    expect_contains(construct([](auto& o) { o.limits.first_cap = 1; }), "also needs limits.cap");
    expect_contains(construct([](auto& o) { o.limits.cap = -3; }), "must be positive, got -3");
    expect_contains(construct([](auto& o) { o.gradient_predivide_factor = 0; }), "predivide");
    expect_contains(construct([](auto& o) { o.gradient_predivide_factor = NAN; }), "predivide");
    expect_contains(construct([](auto& o) {
                      o.delay_allreduce = true;
                      o.trigger_parameters = {0};
                    }),
                    "delay_allreduce");
    for (const int64_t index : {-1, 1, 4}) {
      expect_contains(construct([&](auto& o) { o.trigger_parameters = {index}; }),
                      "trigger parameter " + std::to_string(index));
    }
    ReducerOptions first;
    first.trigger_parameters = {0};
    EXPECT_NO_THROW(Reducer({{"p", p}}, {group}, first));
    expect_contains(message_of<InvalidArgument>([&] { Reducer reducer({{"p", p}}, {}); }),
                    "at least one process group");
    expect_contains(
        message_of<InvalidArgument>([&] { Reducer reducer({{"p", p}}, {group, nullptr}); }),
        "a process group of the reducer is null");
    expect_contains(
        message_of<InvalidArgument>([&] { Reducer reducer({{"p", at::Tensor()}}, {group}); }),
        "'p' is undefined");
    expect_contains(
        message_of<InvalidArgument>([&] { Reducer reducer({{"derived", p * 2}}, {group}); }),
        "'derived' is the result of an operation");
    const at::Tensor meta = at::empty({2}, at::TensorOptions().device(at::kMeta)).requires_grad_();
    expect_contains(
        message_of<InvalidArgument>([&] { Reducer reducer({{"meta", meta}}, {group}); }),
        "parameter 'meta' cannot be synchronized");
    const at::Tensor f8 = at::ones({2}).to(at::kFloat8_e4m3fn).requires_grad_();
    expect_contains(message_of<InvalidArgument>([&] { Reducer reducer({{"f8", f8}}, {group}); }),
                    "Float8_e4m3fn");
  });
}

TEST(ReducerConstruction, NothingTrainable_Backward_DoesNothing) {
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    Reducer reducer({{"frozen", at::ones({2})}}, {group});
    const at::Tensor x = at::ones({2}).requires_grad_();
    const at::Tensor y = x * 2;
    const size_t before = control->issued(rank);
    reducer.prepare_for_forward();
    reducer.watch_outputs({y});
    y.sum().backward();
    EXPECT_EQ(control->issued(rank), before);
    Reducer empty({}, {group});
  });
}

// --- failures during backward ---

class ReducerFailure : public ::testing::TestWithParam<bool> {};

TEST_P(ReducerFailure, CollectiveFails_Backward_ThrowsToItsCallerAndTheNextReducerWorks) {
  const bool on_issue = GetParam();
  const auto control = ThreadBackendControl::create(2);
  run_ranks(control, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    ReducerOptions options;
    options.limits.cap = 1;
    Reducer reducer(model.parameters, {group}, options);
    auto step = [&](Reducer& r) {
      model.zero_grad();
      const at::Tensor y = model.forward(at::full({2, 4}, rank + 1.0));
      r.watch_outputs({y});
      y.square().mean().backward();
    };
    step(reducer);
    const uint64_t next = control->issued(rank);
    const uint64_t failing = next + 1;
    if (on_issue) {
      control->fail_on_issue(failing, rank, "link down");
    } else {
      control->fail(failing, "link down");
    }
    const std::string message = message_of<std::exception>([&] { step(reducer); });
    expect_contains(message, "rank " + std::to_string(rank) + " of 2");
    expect_contains(message, "link down");
    expect_contains(message, "bucket 1");
    expect_contains(message, "'fc1.weight'");
  });

  // The same parameters and a new group, as after a restart.
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    Reducer reducer(model.parameters, {group});
    for (int i = 0; i < 2; ++i) {
      model.zero_grad();
      model.forward(at::full({1, 4}, rank + 1.0)).sum().backward();
    }
    EXPECT_TRUE(model[3].grad().equal(at::ones({2})));
  });
}

INSTANTIATE_TEST_SUITE_P(IssueAndWait, ReducerFailure, ::testing::Bool());

TEST(Reducer, UserErrorInBackward_NextBackward_StartsClean) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
    ToyModel reference = model.clone(at::kDouble);
    ReducerOptions options;
    options.limits.cap = 1;
    Reducer reducer(model.parameters, {group}, options);
    bool fail = false;
    // On both ranks at the same place, after some buckets were launched.
    model[2].register_hook([&](const at::Tensor&) -> void {
      if (fail) throw std::runtime_error("user error");
    });
    for (int step = 0; step < 4; ++step) {
      fail = step == 2;
      model.zero_grad();
      reference.zero_grad();
      const at::Tensor batch = apex::testing::random_batch(8, 4, step);
      const at::Tensor y = model.forward(apex::testing::rows_of_rank(batch, rank, 2));
      reducer.watch_outputs({y});
      if (fail) {
        expect_contains(message_of<std::exception>([&] { y.square().mean().backward(); }),
                        "user error");
        continue;
      }
      y.square().mean().backward();
      reference.forward(batch).square().mean().backward();
      for (size_t i = 0; i < model.size(); ++i) {
        EXPECT_LT(relative_error(model[i].grad(), reference[i].grad()), 1e-5) << step;
      }
    }
    EXPECT_EQ(reducer.statistics().backwards, 3);
  });
}

/// As torch 2.14 and later allow: the group's size can change.
class ReconfiguredGroup final : public c10d::ProcessGroup {
 public:
  ReconfiguredGroup(const Group& given, int rank, int size)
      : ProcessGroup(c10::make_intrusive<c10d::HashStore>(), rank, size), size(size) {
    setBackend(at::kCPU, BackendType::CUSTOM, given->getBackend(at::kCPU));
    setDefaultBackend(BackendType::CUSTOM);
  }
  int getSize() const override { return size; }

  int size;
};

TEST(Reducer, GroupReconfigured_Backward_ThrowsUntilTheSizeIsThatOfConstruction) {
  run_ranks(2, [](int rank, const Group& given) {
    const auto group = c10::make_intrusive<ReconfiguredGroup>(given, rank, 2);
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    Reducer reducer(model.parameters, {group});
    const auto backward = [&] {
      model.zero_grad();
      const at::Tensor y = model.forward(at::full({1, 4}, rank + 1.0));
      reducer.watch_outputs({y});
      y.sum().backward();
    };
    group->size = 1;
    expect_contains(message_of<Error>(backward),
                    "rank " + std::to_string(rank) + " of 1: the process group was reconfigured");
    group->size = 2;
    backward();
    EXPECT_TRUE(model[3].grad().equal(at::ones({2}))) << model[3].grad();
  });
}

// --- communication hooks ---

/// Doubles the result of an all-reduce.
class DoublingHook final : public CommHook {
 public:
  explicit DoublingHook(Group group) : group_(std::move(group)) {}
  c10::intrusive_ptr<c10::ivalue::Future> run(GradientBucket& bucket) override {
    ++calls;
    last_seen |= bucket.is_last;
    std::vector<at::Tensor> message{bucket.buffer};
    return group_->allreduce(message)->getFuture()->then(
        [buffer = bucket.buffer](c10::ivalue::Future&) { return c10::IValue(buffer * 2); },
        c10::TensorType::get());
  }
  int calls = 0;
  bool last_seen = false;

 private:
  Group group_;
};

TEST(Reducer, CommHook_Set_ReplacesTheAllReduceAndItsAverage) {
  for (const bool views : {false, true}) {
    run_ranks(2, [&](int rank, const Group& group) {
      ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
      ReducerOptions options;
      options.limits.cap = 20;
      options.gradient_as_bucket_view = views;
      Reducer reducer(model.parameters, {group}, options);
      auto hook = std::make_shared<DoublingHook>(group);
      reducer.set_comm_hook(hook);
      for (int step = 0; step < 2; ++step) {
        model.zero_grad();
        const at::Tensor y = model.forward(at::full({1, 4}, rank + 1.0));
        reducer.watch_outputs({y});
        y.sum().backward();
        EXPECT_TRUE(model[3].grad().equal(at::full({2}, 4.0))) << model[3].grad();
      }
      EXPECT_GT(hook->calls, 2);
      EXPECT_TRUE(hook->last_seen);
    });
  }
}

TEST(ReducerEarlyStep, InAGradientsHook_IsRefused_AndNamed) {
  run_ranks(2, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
    Reducer reducer(model.parameters, {group});
    const auto step = [&](int number) {
      model.zero_grad();
      const at::Tensor y =
          apex::testing::forward(reducer, model, apex::testing::batch(rank, number));
      apex::testing::loss_of(y).backward();
    };
    step(0);
    std::string refused;
    const auto hook = model[2].register_hook([&](const at::Tensor&) -> void {
      refused = message_of<Error>([&] { Reducer::optimizer_steps({model[0], model[2]}); });
    });
    step(1);
    expect_contains(refused, model.parameters[0].name);
    apex::testing::expect_average(model, 2, 1, "refused before it was written");
    model[2].remove_hook(hook);
    Reducer::optimizer_steps({model[0], model[2]});  // between backwards
    model[2].register_hook([&](const at::Tensor&) -> void {
      const at::NoGradGuard guard;
      model[2].mul_(2);
    });
    const std::string error = message_of<std::exception>([&] { step(2); });
    expect_contains(error, "is updated inside backward");
    expect_contains(error, "'" + model.parameters[2].name + "'");
  });
}

}  // namespace
}  // namespace apex::parallel
