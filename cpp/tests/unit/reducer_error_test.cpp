// SPDX-License-Identifier: BSD-3-Clause
// Options of C++ that are refused, failures that a backend for tests injects, and the end of a
// reducer's life.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <apex/error.h>
#include <apex/parallel/comm_hook.h>
#include <apex/parallel/reducer.h>
#include <support/reducer_steps.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

namespace apex::parallel {
namespace {

using apex::testing::backward;
using apex::testing::expect_contains;
using apex::testing::message_of;
using apex::testing::random_batch;
using apex::testing::relative_error;
using apex::testing::run_ranks;
using apex::testing::small_buckets;
using apex::testing::ThreadBackendControl;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

TEST(ReducerConstruction, InitSyncOff_Construct_LeavesParametersAlone) {
  run_ranks(2, [&](int rank, const Group& group) {
    const at::Tensor p = at::full({2}, rank + 1.0).requires_grad_();
    ReducerOptions options;
    options.init_sync = false;
    Reducer reducer({{"p", p}}, {group}, options);
    EXPECT_TRUE(p.equal(at::full({2}, rank + 1.0)));
  });
}

// What Python's wrappers cannot pass. Other arguments are in python/tests/test_ddp_errors.py.
TEST(ReducerConstruction, BadArguments_Construct_ThrowsInvalidArgument) {
  run_ranks(1, [&](int, const Group& group) {
    const at::Tensor p = at::ones({2}).requires_grad_();
    const auto refused = [&](const std::vector<Group>& groups, const at::Tensor& tensor,
                             const ReducerOptions& options = {}) {
      return message_of<InvalidArgument>([&] { Reducer({{"p", tensor}}, groups, options); });
    };
    for (const int64_t index : {-1, 1, 4}) {
      ReducerOptions options;
      options.trigger_parameters = {index};
      expect_contains(refused({group}, p, options), "trigger parameter " + std::to_string(index));
    }
    ReducerOptions first_only, negative;
    first_only.limits.first_cap = 1;
    negative.limits.cap = -3;
    expect_contains(refused({group}, p, first_only), "also needs limits.cap");
    expect_contains(refused({group}, p, negative), "must not be negative, got -3 and");
    expect_contains(refused({group}, {}), "'p' is undefined");
    expect_contains(refused({group}, p * 2), "'p' is the result of an operation");
    expect_contains(refused({}, p), "at least one process group");
    expect_contains(refused({group, nullptr}, p), "a process group of the reducer is null");
  });
}

TEST(ReducerFailure, CollectiveFails_Backward_ThrowsToItsCaller) {
  for (const bool on_issue : {false, true}) {
    const auto control = ThreadBackendControl::create(2);
    run_ranks(control, [&](int rank, const Group& group) {
      ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
      Reducer reducer(model.parameters, {group}, small_buckets());
      backward(reducer, model, at::full({2, 4}, rank + 1.0));
      const uint64_t failing = control->issued(rank) + 1;
      if (on_issue) {
        control->fail_on_issue(failing, rank, "link down");
      } else {
        control->fail(failing, "link down");
      }
      const std::string message = message_of<std::exception>(
          [&] { backward(reducer, model, at::full({2, 4}, rank + 1.0)); });
      expect_contains(message, "rank " + std::to_string(rank) + " of 2");
      expect_contains(message, "link down");
      expect_contains(message, "bucket 1");
      expect_contains(message, "'fc1.weight'");
    });
  }
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

TEST(ReducerFailure, GroupReconfigured_Backward_ThrowsUntilTheSizeIsThatOfConstruction) {
  run_ranks(2, [](int rank, const Group& given) {
    const auto group = c10::make_intrusive<ReconfiguredGroup>(given, rank, 2);
    const at::Tensor p = at::ones({3}).requires_grad_();
    Reducer reducer({{"p", p}}, {group});
    const auto step = [&] {
      p.mutable_grad() = at::Tensor();
      const at::Tensor y = p * (rank + 1.0);
      reducer.watch_outputs({y, p});  // a leaf has no node
      y.sum().backward();
    };
    group->size = 1;
    expect_contains(message_of<Error>(step),
                    "rank " + std::to_string(rank) + " of 1: the process group was reconfigured");
    group->size = 2;
    step();
    EXPECT_TRUE(p.grad().equal(at::full({3}, 1.5))) << p.grad();
  });
}

TEST(ReducerFailure, ParameterDiffersBeforeTheFirstBackward_IsNamedByIt) {
  run_ranks(2, [](int rank, const Group& group) {
    const at::Tensor p = at::ones({100}).requires_grad_();
    ReducerOptions options;
    options.on_divergence = OnDivergence::kRaise;
    Reducer reducer({{"p", p}}, {group}, options);
    p.detach()[1] += rank;  // the step check samples other elements
    const auto step = [&] {
      const at::Tensor y = p * 2;
      reducer.watch_outputs({y});
      y.sum().backward();
    };
    expect_contains(message_of<Error>(step), "parameter 'p' differs");
  });
}

TEST(ReducerFailure, UpdateInAGradientsHook_IsRefused_AndNamed) {
  run_ranks(2, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 6, 2}, 1);
    Reducer reducer(model.parameters, {group});
    const auto step = [&] {
      model.zero_grad();
      backward(reducer, model, random_batch(5, 4, rank));
    };
    step();
    std::string refused;
    const auto hook = model[2].register_hook([&](const at::Tensor&) -> void {
      refused = message_of<Error>([&] { Reducer::optimizer_steps({model[0], model[2]}); });
    });
    step();
    expect_contains(refused, model.parameters[0].name);
    model[2].remove_hook(hook);
    Reducer::optimizer_steps({model[0], model[2]});  // between backwards
    model[2].register_hook([&](const at::Tensor&) -> void {
      const at::NoGradGuard guard;
      model[2].mul_(2);
    });
    const std::string error = message_of<std::exception>(step);
    expect_contains(error, "is updated inside backward");
    expect_contains(error, "'" + model.parameters[2].name + "'");
  });
}

TEST(ReducerLife, DroppedWhileOutputsLive_Backward_StillSynchronizes) {
  run_ranks(2, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 2}, 1);
    const at::Tensor x = at::full({1, 4}, rank + 1.0);
    at::Tensor y;
    {
      Reducer reducer(model.parameters, {group});
      y = model.forward(x);
      reducer.watch_outputs({y});
    }
    y.sum().backward();
    EXPECT_LT(relative_error(model[0].grad(), at::full({2, 4}, 1.5)), 1e-6);
    // The hooks are destroyed with the graph.
    y = at::Tensor();
    model.zero_grad();
    model.forward(x).sum().backward();
    EXPECT_LT(relative_error(model[0].grad(), at::full({2, 4}, rank + 1.0)), 1e-6);
  });
}

TEST(ReducerLife, Released_LaterBackwardThrows_AndGroupAndHookAreFree) {
  run_ranks(2, [](int, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    const size_t before = group.use_count();
    Reducer reducer(model.parameters, {group}, small_buckets());
    auto hook = make_compress_hook(group, at::kHalf);
    const std::weak_ptr<CommHook> of_hook = hook;
    reducer.set_comm_hook(std::move(hook));
    backward(reducer, model, random_batch(4, 4, 0));
    const at::Tensor kept = model.forward(random_batch(4, 4, 0));
    reducer.watch_outputs({kept});
    EXPECT_GT(group.use_count(), before);
    reducer.release();
    reducer.release();
    EXPECT_TRUE(of_hook.expired());
    // Although the graph of `kept` holds the reducer. Another thread drops the last reference.
    for (int i = 0; i < 10'000 && group.use_count() != before; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(group.use_count(), before);
    expect_contains(message_of<Error>([&] { kept.sum().backward(); }),
                    "released its process groups");
    reducer.prepare_for_forward();
    EXPECT_FALSE(reducer.plan().has_value());
  });
}

/// Records the thread on which it is destroyed.
class EndingGroup final : public c10d::ProcessGroup {
 public:
  explicit EndingGroup(std::promise<std::thread::id>& ended) : ProcessGroup(0, 1), ended_(ended) {}
  ~EndingGroup() override { end(); }
  /// Called instead of the destructor while weak references exist.
  void release_resources() override { end(); }

 private:
  void end() {
    if (!std::exchange(told_, true)) ended_.set_value(std::this_thread::get_id());
  }
  std::promise<std::thread::id>& ended_;
  bool told_ = false;
};

/// A thread that drops a loss in Python holds the GIL, which a group's threads may need.
TEST(ReducerLife, GraphOutlivesEveryOtherHolderOfTheGroup_GroupEndsOnAnotherThread) {
  std::promise<std::thread::id> ended;
  ToyModel model = ToyModel::mlp({4, 2}, 1);
  at::Tensor kept;
  {
    const Group group = c10::make_intrusive<EndingGroup>(ended);
    Reducer reducer(model.parameters, {group}, small_buckets());
    reducer.prepare_for_forward();
    kept = model.forward(random_batch(4, 4, 0));
    reducer.watch_outputs({kept});
  }
  auto where = ended.get_future();
  EXPECT_EQ(where.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  kept.reset();
  EXPECT_NE(where.get(), std::this_thread::get_id());
}

}  // namespace
}  // namespace apex::parallel
