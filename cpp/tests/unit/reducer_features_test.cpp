// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <apex/error.h>
#include <apex/parallel/comm_hook.h>
#include <apex/parallel/reducer.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

// Opt-in checks, uneven inputs, chained hooks, and release of groups.

namespace apex::parallel {
namespace {

using apex::testing::random_batch;
using apex::testing::relative_error;
using apex::testing::run_ranks;
using apex::testing::ThreadBackendControl;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

ReducerOptions small_buckets(int64_t cap = 1) {
  ReducerOptions options;
  options.limits.cap = cap;
  return options;
}

void backward(Reducer& reducer, ToyModel& model, const at::Tensor& batch) {
  reducer.prepare_for_forward();
  const at::Tensor y = model.forward(batch);
  reducer.watch_outputs({y});
  y.square().mean().backward();
}

template <typename Exception, typename Call>
void expect_throws(Call&& call, const std::string& part) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown, expected: " << part;
  } catch (const Exception& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(ReducerRegisteredBuffers, BackendWithMemory_Buckets_LieThereAndGradientsAreRight) {
  for (const bool views : {false, true}) {
    const auto control = ThreadBackendControl::create(2);
    control->allocate_tensors();
    run_ranks(control, [&](int rank, const Group& group) {
      ToyModel model = ToyModel::mlp({4, 8, 8, 2}, 1);
      ReducerOptions options = small_buckets(60);  // single parameters are reduced in place
      options.registered_buffers = true;
      options.gradient_as_bucket_view = views;
      Reducer reducer(model.parameters, {group}, options);
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        backward(reducer, model, random_batch(4, 4, step));  // the same on both ranks
        ToyModel reference = model.clone(at::kDouble);
        reference.forward(random_batch(4, 4, step)).square().mean().backward();
        for (size_t i = 0; i < model.size(); ++i) {
          EXPECT_LT(apex::testing::relative_error(model[i].grad(), reference[i].grad()), 1e-5);
        }
      }
      EXPECT_GT(reducer.statistics().buffers_registered, 0);
      const auto there = control->allocated();
      size_t messages = 0;
      for (const auto& record : control->log(rank)) messages += there.count(record.data_ptr);
      EXPECT_GE(messages, static_cast<size_t>(3 * reducer.statistics().buffers_registered));
    });
  }
}

TEST(ReducerRegisteredBuffers, BackendWithoutMemoryOrOutOfIt_Buckets_LieInTorchsMemory) {
  for (const bool fails : {false, true}) {
    const auto control = ThreadBackendControl::create(2);
    if (fails) control->allocate_tensors(/*fails=*/true);
    run_ranks(control, [&](int rank, const Group& group) {
      ToyModel model = ToyModel::mlp({4, 8, 2}, 1);
      ReducerOptions options = small_buckets();
      options.registered_buffers = true;
      Reducer reducer(model.parameters, {group}, options);
      backward(reducer, model, random_batch(4, 4, rank));
      EXPECT_EQ(reducer.statistics().buffers_registered, 0);
      EXPECT_EQ(reducer.statistics().backwards, 1);
    });
  }
}

TEST(ReducerRelease, BackwardAfterIt_Throws_AndTheGroupIsFree) {
  run_ranks(2, [](int, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    const size_t before = group.use_count();
    Reducer reducer(model.parameters, {group}, small_buckets());
    backward(reducer, model, random_batch(4, 4, 0));
    const at::Tensor kept = model.forward(random_batch(4, 4, 0));
    reducer.watch_outputs({kept});
    EXPECT_GT(group.use_count(), before);
    reducer.release();
    reducer.release();
    // Although the graph of `kept` holds the reducer. Another thread drops the last reference.
    for (int i = 0; i < 10'000 && group.use_count() != before; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(group.use_count(), before);
    expect_throws<Error>([&] { kept.sum().backward(); }, "released its process groups");
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
TEST(ReducerLastReference, GraphOutlivesEveryOtherHolderOfTheGroup_GroupEndsOnAnotherThread) {
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

/// What a hook holds (a group, error feedback) is released even if other references to the reducer
/// exist.
TEST(ReducerRelease, CommunicationHook_IsReleased) {
  run_ranks(2, [](int, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    Reducer reducer(model.parameters, {group}, small_buckets());
    auto hook = make_compress_hook(group, at::kHalf);
    const std::weak_ptr<CommHook> of_hook = hook;
    reducer.set_comm_hook(std::move(hook));
    backward(reducer, model, random_batch(4, 4, 0));
    EXPECT_FALSE(of_hook.expired());
    reducer.release();
    EXPECT_TRUE(of_hook.expired());
  });
}

/// Information that only one rank has is sent with the last message, for any number of buckets.
TEST(ReducerLateParameter, OneRankUsesIt_SeveralFlatBuckets_IsAveragedOnEveryRank) {
  run_ranks(3, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 8, 8, 2}, 1);
    const at::Tensor extra = at::ones({3}).requires_grad_();
    std::vector<NamedTensor> parameters = model.parameters;
    parameters.push_back({"extra", extra});
    Reducer reducer(parameters, {group}, small_buckets(20));  // flat buckets
    for (int step = 0; step < 5; ++step) {
      model.zero_grad();
      extra.mutable_grad() = at::Tensor();
      reducer.prepare_for_forward();
      at::Tensor y = model.forward(random_batch(4, 4, step)).square().mean();
      if (step >= 2 && rank == 1) y = y + (extra * 6).sum();
      reducer.watch_outputs({y});
      y.backward();
      ASSERT_EQ(extra.grad().defined(), step >= 2) << step;
      if (step >= 2) {
        EXPECT_TRUE(extra.grad().equal(at::full({3}, 2.0F))) << step;
      }
    }
    EXPECT_EQ(reducer.statistics().plans_recorded, 2);
  });
}

TEST(ReducerJoin, RankWithoutData_FollowsTheOthersWithZeros) {
  for (const bool by_world : {true, false}) {
    for (const bool views : {false, true}) {
      run_ranks(3, [&](int rank, const Group& group) {
        const int64_t steps_of[] = {3, 1, 0};
        ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
        ReducerOptions options = small_buckets(20);
        options.gradient_as_bucket_view = views;
        Reducer reducer(model.parameters, {group}, options);
        reducer.begin_join(by_world);
        for (int64_t step = 0; step < steps_of[rank]; ++step) {
          const double active = step == 0 ? 2.0 : 1.0;
          model.zero_grad();
          backward(reducer, model, random_batch(4, 4, 10 * static_cast<int>(step) + rank));
          std::vector<at::Tensor> expected(model.size());
          for (int r = 0; r < 2; ++r) {
            if (step >= steps_of[r]) continue;
            ToyModel reference = model.clone(at::kDouble);
            reference.forward(random_batch(4, 4, 10 * static_cast<int>(step) + r))
                .square()
                .mean()
                .backward();
            const double share = 1.0 / (by_world ? 3.0 : active);
            for (size_t i = 0; i < model.size(); ++i) {
              const at::Tensor part = reference[i].grad() * share;
              expected[i] = expected[i].defined() ? expected[i] + part : part;
            }
          }
          for (size_t i = 0; i < model.size(); ++i) {
            EXPECT_LT(relative_error(model[i].grad(), expected[i]), 1e-5) << step << " " << i;
          }
        }
        const at::Tensor state = at::full({2}, rank);
        reducer.end_join({state});
        EXPECT_TRUE(state.equal(at::zeros({2}, at::kLong).to(state.dtype())));  // rank 0's
        EXPECT_EQ(reducer.statistics().backwards, 3);
      });
    }
  }
}

/// Issues a second all-reduce from the callback of its first, as PowerSGD does.
class ChainingHook final : public CommHook {
 public:
  explicit ChainingHook(Group group) : group_(std::move(group)) {}
  c10::intrusive_ptr<c10::ivalue::Future> run(GradientBucket& bucket) override {
    auto result = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    std::vector<at::Tensor> first{bucket.buffer};
    group_->allreduce(first)->getFuture()->addCallback(
        [result, group = group_, buffer = bucket.buffer](c10::ivalue::Future&) {
          std::vector<at::Tensor> second{buffer};
          group->allreduce(second)->getFuture()->addCallback(
              [result, buffer](c10::ivalue::Future&) { result->markCompleted(buffer); });
        });
    return result;
  }

 private:
  Group group_;
};

TEST(ReducerCommHook, CollectivesFromCallbacks_ComeInOneOrderOnEveryRank) {
  // The backend fails when ranks issue different collectives at the same position.
  for (int round = 0; round < 20; ++round) {
    run_ranks(3, [](int, const Group& group) {
      ToyModel model = ToyModel::mlp({4, 16, 9, 5, 2}, 1);
      Reducer reducer(model.parameters, {group}, small_buckets());
      reducer.set_comm_hook(std::make_shared<ChainingHook>(group));
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        backward(reducer, model, random_batch(4, 4, step));
        ToyModel reference = model.clone(at::kDouble);
        reference.forward(random_batch(4, 4, step)).square().mean().backward();
        for (size_t i = 0; i < model.size(); ++i) {
          // Summed twice over three ranks with the same values.
          EXPECT_LT(relative_error(model[i].grad(), reference[i].grad() * 9), 1e-5);
        }
      }
    });
  }
}

/// float16 and bfloat16 have the same width, and float16 cannot represent large bfloat16 values.
TEST(ReducerCommHook, GradientsOfTheCommunicationDtype_AreSentUnchanged) {
  run_ranks(2, [](int, const Group& group) {
    const at::Tensor p = at::ones({4}, at::kBFloat16).requires_grad_();
    Reducer reducer({{"p", p}}, {group});
    reducer.set_comm_hook(make_compress_hook(group, at::kHalf));
    reducer.prepare_for_forward();
    (p * 131072.0).sum().backward();
    EXPECT_TRUE(p.grad().equal(at::full({4}, 131072.0, at::kBFloat16))) << p.grad();
  });
}

TEST(ReducerCommHook, OtherDtypes_AreRefused) {
  run_ranks(1, [](int, const Group& group) {
    expect_throws<InvalidArgument>([&] { make_compress_hook(group, at::kFloat); },
                                   "float16 or bfloat16, got Float");
    expect_throws<InvalidArgument>([&] { make_compress_hook({}, at::kHalf); },
                                   "needs a process group");
  });
}

}  // namespace
}  // namespace apex::parallel
