// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <apex/error.h>
#include <apex/parallel/reducer.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

// Backwards that end before their buckets have arrived.

namespace apex::parallel {
namespace {

using apex::testing::relative_error;
using apex::testing::run_ranks;
using apex::testing::ThreadBackendControl;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kWorld = 2;
constexpr int kSettled = 4;  // backwards until the first deferred one

ToyModel toy_model() { return ToyModel::mlp({4, 8, 8, 8, 2}, 1); }

at::Tensor batch(int rank, int step) {
  return apex::testing::random_batch(4, 4, 100 * step + rank);
}

void backward(Reducer& reducer, ToyModel& model, const at::Tensor& x) {
  reducer.prepare_for_forward();
  const at::Tensor y = model.forward(x);
  reducer.watch_outputs({y});
  y.square().mean().backward();
}

/// A model, its reducer, and the parameters that its bucket callback has reported, in order.
struct Deferred {
  explicit Deferred(const Group& group, bool views = false) {
    ReducerOptions options;
    options.limits.cap = 30;
    options.gradient_as_bucket_view = views;
    reducer = std::make_unique<Reducer>(model.parameters, std::vector<Group>{group}, options);
    reducer->set_deferred(true);
    reducer->set_bucket_callback([this](const ReducedBucket& bucket) {
      reported.insert(reported.end(), bucket.parameters.begin(), bucket.parameters.end());
    });
  }

  void settle(int rank) {
    for (int step = 0; step < kSettled; ++step) {
      model.zero_grad();
      backward(*reducer, model, batch(rank, step));
      reducer->wait();
    }
    reported.clear();
    model.zero_grad();
  }

  void expect_average(int step) const {
    ToyModel reference = toy_model().clone(at::kDouble);
    for (int r = 0; r < kWorld; ++r) reference.forward(batch(r, step)).square().mean().backward();
    for (size_t i = 0; i < model.size(); ++i) {
      EXPECT_LT(relative_error(model[i].grad(), reference[i].grad() / kWorld), 1e-5)
          << model.parameters[i].name;
    }
  }

  ToyModel model = toy_model();
  std::vector<int64_t> reported;
  std::unique_ptr<Reducer> reducer;
};

class ReducerDefer : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(CopiesAndViews, ReducerDefer, ::testing::Bool());

TEST_P(ReducerDefer, CollectivesHeldBack_BackwardReturns_AndEachParameterIsWaitedForAlone) {
  const auto control = ThreadBackendControl::create(kWorld);
  run_ranks(control, [&](int rank, const Group& group) {
    Deferred deferred(group, GetParam());
    deferred.settle(rank);
    Reducer& reducer = *deferred.reducer;
    const auto plan = reducer.plan()->buckets;
    ASSERT_GT(plan.size(), 2u);
    const uint64_t first = control->issued(rank);
    for (uint64_t seq = first; seq < first + plan.size(); ++seq) control->hold(seq);
    backward(reducer, deferred.model, batch(rank, 7));  // returns although no bucket can arrive
    EXPECT_EQ(reducer.statistics().deferred, 2);
    EXPECT_EQ(reducer.in_flight().size(), deferred.model.size());
    EXPECT_TRUE(deferred.reported.empty());

    // Releases only the second bucket.
    control->release(first + 1);
    reducer.wait_for(plan[1]);
    EXPECT_EQ(deferred.reported, plan[1]);
    EXPECT_EQ(reducer.in_flight().size(), deferred.model.size() - plan[1].size());
    reducer.wait_for(plan[1]);
    EXPECT_EQ(deferred.reported, plan[1]) << "reported twice";

    control->release_all();
    reducer.wait();
    EXPECT_EQ(deferred.reported.size(), deferred.model.size());
    EXPECT_TRUE(reducer.in_flight().empty());
    deferred.expect_average(7);
    EXPECT_EQ(reducer.statistics().backwards, kSettled + 1);
  });
}

TEST_P(ReducerDefer, NextBackwardWithoutWaiting_CompletesTheLastAndThrowsNamingAParameter) {
  run_ranks(kWorld, [&](int rank, const Group& group) {
    Deferred deferred(group, GetParam());
    deferred.settle(rank);
    backward(*deferred.reducer, deferred.model, batch(rank, 7));
    try {
      backward(*deferred.reducer, deferred.model, batch(rank, 8));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("before its last update was complete"),
                std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("'fc"), std::string::npos) << error.what();
    }
    // Training continues.
    deferred.reducer->wait();
    deferred.model.zero_grad();
    backward(*deferred.reducer, deferred.model, batch(rank, 9));
    deferred.reducer->wait();
    deferred.expect_average(9);
  });
}

TEST_P(ReducerDefer, PlanHookOrCallbackChanged_WaitsFirst) {
  run_ranks(kWorld, [&](int rank, const Group& group) {
    Deferred deferred(group, GetParam());
    deferred.settle(rank);
    for (int what = 0; what < 4; ++what) {
      backward(*deferred.reducer, deferred.model, batch(rank, what));
      EXPECT_EQ(deferred.reducer->in_flight().empty(), what > 1) << what;  // a new plan is recorded
      if (what == 0) deferred.reducer->buffers();
      if (what == 1) deferred.reducer->rebuild_buckets();
      if (what == 2) deferred.reducer->set_comm_hook(nullptr);
      if (what == 3) deferred.reducer->set_deferred(false);
      EXPECT_TRUE(deferred.reducer->in_flight().empty()) << what;
      deferred.expect_average(what);
      deferred.model.zero_grad();
    }
  });
}

/// A forward that waited for everything at its start would leave nothing to overlap.
TEST_P(ReducerDefer, NextForwardBegins_NothingIsWaitedFor) {
  const auto control = ThreadBackendControl::create(kWorld);
  run_ranks(control, [&](int rank, const Group& group) {
    Deferred deferred(group, GetParam());
    deferred.settle(rank);
    Reducer& reducer = *deferred.reducer;
    const uint64_t first = control->issued(rank);
    const size_t buckets = reducer.plan()->buckets.size();
    for (uint64_t seq = first; seq < first + buckets; ++seq) control->hold(seq);
    backward(reducer, deferred.model, batch(rank, 7));
    reducer.prepare_for_forward();
    EXPECT_EQ(reducer.in_flight().size(), deferred.model.size());
    control->release_all();
    reducer.wait();
    deferred.expect_average(7);
  });
}

/// In-flight buckets are dropped: afterwards, no code may read or write them, or wait for them.
TEST_P(ReducerDefer, Released_NothingIsInFlightAnyMore) {
  const auto control = ThreadBackendControl::create(kWorld);
  run_ranks(control, [&](int rank, const Group& group) {
    Deferred deferred(group, GetParam());
    deferred.settle(rank);
    Reducer& reducer = *deferred.reducer;
    backward(reducer, deferred.model, batch(rank, 7));
    EXPECT_FALSE(reducer.in_flight().empty());
    reducer.release();
    EXPECT_TRUE(reducer.in_flight().empty());
    reducer.wait();
    reducer.wait_for({0});
    EXPECT_TRUE(deferred.reported.empty());
  });
}

TEST_P(ReducerDefer, RankThatMissesAGradient_WaitsAtOnceAndTheOthersDoNot) {
  run_ranks(kWorld, [&](int rank, const Group& group) {
    Deferred deferred(group, GetParam());
    deferred.settle(rank);
    const int64_t before = deferred.reducer->statistics().deferred;
    deferred.reducer->prepare_for_forward();
    const at::Tensor y = deferred.model.forward(batch(rank, 3));
    deferred.reducer->watch_outputs({y});
    if (rank == 0) {
      y.square().mean().backward();
    } else {
      deferred.model[5].sum().backward();  // only one parameter
    }
    EXPECT_EQ(deferred.reducer->statistics().deferred - before, rank == 0 ? 1 : 0);
    deferred.reducer->wait();
    for (size_t i = 0; i < deferred.model.size(); ++i) {
      EXPECT_TRUE(deferred.model[i].grad().defined()) << deferred.model.parameters[i].name;
    }
  });
}

enum class Origin { kLearnt, kExtended, kGivenAndExtended };

class ReducerDeferOrder : public ::testing::TestWithParam<Origin> {};
INSTANTIATE_TEST_SUITE_P(Plans, ReducerDeferOrder,
                         ::testing::Values(Origin::kLearnt, Origin::kExtended,
                                           Origin::kGivenAndExtended));

TEST_P(ReducerDeferOrder, BucketsThatArriveLate_AreSentInTheOrderOfTheNextForward) {
  const bool is_extended = GetParam() != Origin::kLearnt;
  const int plan_at = is_extended ? 1 : 0;   // from this step on the plan does not change
  const int order_at = is_extended ? 4 : 2;  // in the third backward with that plan
  const auto control = ThreadBackendControl::create(kWorld);
  run_ranks(control, [&](int rank, const Group& group) {
    Deferred deferred(group);
    ToyModel& model = deferred.model;
    if (GetParam() == Origin::kGivenAndExtended) {
      BucketPlan given;
      given.buckets = {{7, 6}, {5, 4}, {1, 0}};
      deferred.reducer->set_plan(given);
    }
    std::vector<std::vector<int64_t>> recorded;
    for (int step = 0; step <= order_at + 1; ++step) {
      model.zero_grad();
      const uint64_t first = control->issued(rank);
      const size_t buckets = recorded.size();
      if (step == order_at) {
        // All but the first arrive after backward, when rank 0, which records, waits for the first.
        for (uint64_t seq = first + 1; seq < first + buckets; ++seq) control->hold(seq);
        deferred.reducer->set_bucket_callback([&](const ReducedBucket&) {
          if (rank == 0) control->release_all();
        });
      }
      if (is_extended && step == 0) {  // without the second layer
        deferred.reducer->prepare_for_forward();
        at::Tensor y = at::addmm(model[1], batch(rank, step).to(at::kFloat), model[0].t()).tanh();
        for (size_t layer : {2, 3}) y = at::addmm(model[2 * layer + 1], y, model[2 * layer].t());
        deferred.reducer->watch_outputs({y});
        y.square().mean().backward();
      } else {
        backward(*deferred.reducer, model, batch(rank, step));
      }
      deferred.reducer->wait();
      if (step == plan_at) recorded = deferred.reducer->plan()->buckets;
    }
    EXPECT_EQ(deferred.reducer->statistics().plans_extended, is_extended ? 1 : 0);
    const auto plan = deferred.reducer->plan()->buckets;
    ASSERT_GT(recorded.size(), 3u);
    // Arrived buckets and the one in flight keep their place; at most those two, if the first was
    // in time.
    size_t stay = 0;
    while (stay < plan.size() && plan[stay] == recorded[stay]) ++stay;
    EXPECT_GE(stay, 1u);
    EXPECT_LE(stay, 2u);
    std::vector<std::vector<int64_t>> rest(recorded.begin() + stay, recorded.end());
    std::reverse(rest.begin(), rest.end());
    EXPECT_EQ(std::vector<std::vector<int64_t>>(plan.begin() + stay, plan.end()), rest);
    EXPECT_EQ(plan[stay], recorded.back()) << "the first layer does not come first";
    deferred.reducer->set_deferred(false);
  });
}

}  // namespace
}  // namespace apex::parallel
