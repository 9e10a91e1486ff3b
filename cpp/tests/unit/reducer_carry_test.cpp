// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>

#include <apex/parallel/comm_hook.h>
#include <apex/parallel/reducer.h>
#include <support/reducer_steps.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

// Backwards that one rank cannot run as the others expect, and steps in which ranks do different
// things. Oracle: the float64 average over ranks. The thread backend fails if messages do not
// match. See Note [Carried through] and Note [Ranks that are out of step].

namespace apex::parallel {
namespace {

using apex::testing::batch;
using apex::testing::forward;
using apex::testing::loss_of;
using apex::testing::random_batch;
using apex::testing::relative_error;
using apex::testing::run_ranks;
using apex::testing::thrown_by;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kWorld = 3;
const std::vector<int64_t> kWidths{4, 6, 6, 2};

void step(Reducer& reducer, const ToyModel& model, int rank, int number) {
  loss_of(forward(reducer, model, batch(rank, number))).backward();
}

void expect_average(const ToyModel& model, int number, const std::string& where) {
  apex::testing::expect_average(model, kWorld, number, where);
}

void clear_in_place(ToyModel& model) {
  for (auto& parameter : model.parameters) {
    if (parameter.tensor.grad().defined()) parameter.tensor.mutable_grad().detach_().zero_();
  }
}

struct Place {
  const char* name;
  size_t parameter;  ///< its gradient's hook throws
};

class ReducerException : public ::testing::TestWithParam<std::tuple<int64_t, bool, bool, Place>> {};

TEST_P(ReducerException, OneRankThrows_EveryRankThrows_AndTheNextStepIsRight) {
  const auto [cap, views, hooked, place] = GetParam();
  ReducerOptions options;
  options.limits.cap = cap;
  options.gradient_as_bucket_view = views;
  for (const bool recording : {true, false}) {
    for (const bool clears_to_zero : {true, false}) {
      run_ranks(kWorld, [&, place = place, hooked = hooked](int rank, const Group& group) {
        ToyModel model = ToyModel::mlp(kWidths, 1);
        Reducer reducer(model.parameters, {group}, options);
        if (hooked) reducer.set_comm_hook(make_compress_hook(reducer.communicator(), at::kHalf));
        const int fails_in = recording ? 0 : 2;
        bool fail = false;
        model[place.parameter].register_hook([&](const at::Tensor&) -> void {
          if (fail) throw std::runtime_error("user error");
        });
        for (int number = 0; number < fails_in + 3; ++number) {
          clears_to_zero ? clear_in_place(model) : model.zero_grad();
          if (number != fails_in) {
            step(reducer, model, rank, number);
            if (!hooked) expect_average(model, number, place.name);
            continue;
          }
          fail = rank == 1;
          const std::string error = thrown_by([&] { step(reducer, model, rank, number); });
          fail = false;
          if (rank == 1) {
            EXPECT_NE(error.find("user error"), std::string::npos) << error;
          } else {
            EXPECT_NE(error.find("was ended by an exception on rank 1"), std::string::npos)
                << place.name << ": " << error;
          }
        }
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, ReducerException,
                         ::testing::Combine(::testing::Values(1, 40, 10'000'000), ::testing::Bool(),
                                            ::testing::Bool(),
                                            ::testing::Values(Place{"last layer", 4},
                                                              Place{"middle layer", 2},
                                                              Place{"first layer", 0})));

/// For example in the loss: the reducer has not seen that backward. The rank's next backward joins
/// the one in which the others are.
TEST(ReducerException, BeforeBackwardReachesTheModel_TheNextBackwardAverages) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp(kWidths, 1);
    Reducer reducer(model.parameters, {group});
    step(reducer, model, rank, 0);
    model.zero_grad();
    if (rank == 1) {
      at::Tensor y = forward(reducer, model, random_batch(5, 4, rank));
      y.register_hook([](const at::Tensor&) -> void { throw std::runtime_error("user error"); });
      EXPECT_EQ(thrown_by([&] { y.square().mean().backward(); }), "user error");
    }
    model.zero_grad();
    step(reducer, model, rank, 1);
    expect_average(model, 1, "after an exception in the loss of one rank");
  });
}

TEST(ReducerException, DifferentLayersOnDifferentRanks_EveryRankThrows_AndTheNextStepIsRight) {
  run_ranks(kWorld, [&](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp(kWidths, 1);
    ReducerOptions options;
    options.limits.cap = 1;
    Reducer reducer(model.parameters, {group}, options);
    bool fail = false;
    model[static_cast<size_t>(2 * rank)].register_hook([&](const at::Tensor&) -> void {
      if (fail) throw std::runtime_error("user error");
    });
    for (int number = 0; number < 8; ++number) {
      model.zero_grad();
      fail = number % 3 == 1;
      const std::string error = thrown_by([&] { step(reducer, model, rank, number); });
      EXPECT_EQ(error.empty(), !fail) << error;
      if (!fail) expect_average(model, number, "after errors at several layers");
    }
  });
}

/// All buckets of the rank are full. The others may report something else, or call a collective
/// right after.
TEST(ReducerException, BehindTheLastGradient_EveryRankThrows_AndTheNextStepIsRight) {
  for (const std::string also : {"", "freezes", "writes"}) {
    for (const int64_t cap : {1, 1 << 20}) {
      run_ranks(kWorld, [&](int rank, const Group& group) {
        ToyModel model = ToyModel::mlp(kWidths, 1);
        ReducerOptions options;
        options.limits.cap = cap;
        Reducer reducer(model.parameters, {group}, options);
        step(reducer, model, rank, 0);
        model.zero_grad();
        if (rank == 0 && also == "freezes") model[2].set_requires_grad(false);
        if (rank == 0 && also == "writes")
          at::NoGradGuard(), model[2].detach().mul_(1);  // with unchanged values
        // After all accumulators, which autograd runs before other nodes.
        at::Tensor x = batch(rank, 1).to(at::kFloat).requires_grad_().mul(1);
        x.register_hook([&](const at::Tensor&) -> void {
          if (rank == 1) throw std::runtime_error("user error");
        });
        const std::string error =
            thrown_by([&] { loss_of(forward(reducer, model, x)).backward(); });
        EXPECT_NE(error.find(rank == 1 ? "user error" : "ended by an exception on rank 1"),
                  std::string::npos)
            << also << ": " << error;
        std::vector<at::Tensor> mine{at::full({3}, rank)};
        group->allreduce(mine)->wait();
        EXPECT_EQ(mine[0][0].item<float>(), 3);
        for (int number = 2; number < 5; ++number) {
          model.zero_grad();
          model[2].set_requires_grad(true);
          step(reducer, model, rank, number);
          expect_average(model, number, "afterwards");
        }
      });
    }
  }
}

/// The first layer's gradient comes last: everything has been sent when its hook throws.
TEST(ReducerException, EveryRankThrowsLast_ThenThePlanIsLeft_NextStepsAreRight) {
  for (const bool rebuild : {true, false}) {
    run_ranks(kWorld, [&](int rank, const Group& group) {
      ToyModel model = ToyModel::mlp(kWidths, 1);
      Reducer reducer(model.parameters, {group});
      bool fail = false;
      at::Tensor x;
      for (int number = 0; number < 5; ++number) {
        model.zero_grad();
        fail = number == 2 && rank != 2;
        x = batch(rank, number).requires_grad_();
        x.register_hook([&](const at::Tensor&) -> void {
          if (fail) throw std::runtime_error("user error");
        });
        thrown_by([&] { forward(reducer, model, x).square().mean().backward(); });
        if (number == 2 && rebuild) reducer.rebuild_buckets();
        if (number > 2) expect_average(model, number, "afterwards");
      }
    });
  }
}

TEST(ReducerException, SparseBucket_OneRankThrows_EveryRankThrows_AndTheNextStepIsRight) {
  run_ranks(2, [](int rank, const Group& group) {
    const at::Tensor table = at::zeros({4, 2}).requires_grad_();
    const at::Tensor dense = at::ones({2}).requires_grad_();
    Reducer reducer({{"dense", dense}, {"table", table}}, {group});
    bool fail = false;
    dense.register_hook([&](const at::Tensor&) -> void {
      if (fail) throw std::runtime_error("user error");
    });
    table.register_hook([&](const at::Tensor&) -> void {
      if (fail) throw std::runtime_error("user error");
    });
    for (int number = 0; number < 4; ++number) {
      dense.mutable_grad() = table.mutable_grad() = at::Tensor();
      fail = number == 2 && rank == 1;
      reducer.prepare_for_forward();
      const at::Tensor rows =
          at::embedding(table, at::full({1}, rank, at::kLong), -1, false, /*sparse=*/true);
      const at::Tensor y = (rows + dense).sum() * (rank + 1.0);
      reducer.watch_outputs({y});
      const std::string error = thrown_by([&] { y.backward(); });
      EXPECT_EQ(error.empty(), number != 2) << number << ": " << error;
      if (number == 2) continue;
      EXPECT_EQ(dense.grad()[0].item<float>(), 1.5F);
      EXPECT_EQ(table.grad().to_dense()[1][0].item<float>(), 1.0F);
    }
  });
}

struct Misstep {
  const char* said;
  std::function<void(Reducer&, ToyModel&, int)> act;  ///< rank 1's additional action in step 3
};

std::vector<at::Tensor> tensors_of(const ToyModel& model) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : model.parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

TEST(ReducerOutOfStep, EachWayToGetThere_ThrowsInThatStepOnEveryRank_NamingRankAndDeed) {
  const Misstep missteps[] = {
      {"rank 1 updated the parameters after a backward without synchronization",
       [](Reducer& reducer, ToyModel& model, int) {
         reducer.set_synchronizing(false);
         step(reducer, model, 1, 9);
         reducer.set_synchronizing(true);
         model.sgd_step(0.1);
       }},
      {"rank 1 stepped an optimizer twice without a backward in between",
       [](Reducer&, ToyModel& model, int) { Reducer::optimizer_stepped(tensors_of(model), 1); }},
  };
  for (const Misstep& misstep : missteps) {
    run_ranks(kWorld, [&](int rank, const Group& group) {
      ToyModel model = ToyModel::mlp(kWidths, 1);
      Reducer reducer(model.parameters, {group});
      for (int number = 0; number < 3; ++number) {
        model.zero_grad();
        step(reducer, model, rank, number);
        model.sgd_step(0.1);
        Reducer::optimizer_stepped(tensors_of(model), 1);
      }
      model.zero_grad();
      if (rank == 1) misstep.act(reducer, model, rank);
      model.zero_grad();
      const std::string error = thrown_by([&] { step(reducer, model, rank, 3); });
      EXPECT_NE(error.find(misstep.said), std::string::npos) << misstep.said << ": " << error;
    });
  }
}

TEST(ReducerOutOfStep, RankThatDidNotUpdate_IsFound_ByItsParameters) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp(kWidths, 1);
    Reducer reducer(model.parameters, {group});
    step(reducer, model, rank, 0);
    if (rank != 1) model.sgd_step(0.1);
    const std::string error = thrown_by([&] { step(reducer, model, rank, 1); });
    EXPECT_NE(
        error.find("rank 0, rank 2 updated the parameters since the last synchronized backward, "
                   "rank 1 did not"),
        std::string::npos)
        << error;
  });
}

TEST(ReducerOutOfStep, RankThatDidNotUpdateThisTime_IsFound_AlthoughItHasBefore) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp(kWidths, 1);
    Reducer reducer(model.parameters, {group});
    for (int number = 0; number < 3; ++number) {
      model.zero_grad();
      step(reducer, model, rank, number);
      if (number < 2 || rank != 1) model.sgd_step(0.1);
    }
    const std::string error = thrown_by([&] { step(reducer, model, rank, 3); });
    EXPECT_NE(error.find("rank 1 did not"), std::string::npos) << error;
  });
}

TEST(ReducerOutOfStep, ForwardThatBackwardReachesLast_IsNotTakenForSkipped) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp(kWidths, 1);
    Reducer reducer(model.parameters, {group});
    for (int number = 0; number < 4; ++number) {
      model.zero_grad();
      // Rank 1 uses no parameter of the first forward; all buckets are launched before backward
      // reaches them.
      reducer.prepare_for_forward();
      const at::Tensor x = batch(rank, number).requires_grad_() * 1.0;
      const at::Tensor first = rank == 1 ? x : model.forward(x);
      reducer.watch_outputs({first});
      const at::Tensor second = forward(reducer, model, batch(rank, number) + 0 * first.sum());
      second.square().mean().backward();
      model.sgd_step(0.1);
      Reducer::optimizer_stepped(tensors_of(model), 1);
    }
  });
}

TEST(ReducerOutOfStep, WhatRanksMayDoDifferently_DoesNotThrow) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp(kWidths, 1);
    Reducer reducer(model.parameters, {group});
    for (int number = 0; number < 4; ++number) {
      model.zero_grad();
      if (rank == 1) {
        forward(reducer, model, random_batch(5, 4, 3));  // to build the graph
        reducer.prepare_for_forward();                   // of a forward that throws
      }
      step(reducer, model, rank, number);
      expect_average(model, number, "evaluation on one rank");
      // One rank steps and the others receive, as in a sharded optimizer.
      if (rank == 0) model.sgd_step(0.1);
      for (size_t i = 0; i < model.size(); ++i) {
        std::vector<at::Tensor> values{model[i].detach().clone()};
        group->broadcast(values)->wait();
        const at::NoGradGuard guard;
        if (rank != 0) model[i].set_data(values[0]);
      }
    }
  });
}

TEST(ReducerLeavesPlan, OneRankOnly_EveryRankThrowsNamingIt_AndAllCanGoOn) {
  struct Way {
    const char* said;
    std::function<void(Reducer&)> act;
  };
  const Way ways[] = {
      {"rebuild_buckets()", [](Reducer& reducer) { reducer.rebuild_buckets(); }},
      {"another communication hook",
       [](Reducer& reducer) {
         reducer.set_comm_hook(make_compress_hook(reducer.communicator(), at::kHalf));
       }},
  };
  for (const Way& way : ways) {
    run_ranks(kWorld, [&](int rank, const Group& group) {
      ToyModel model = ToyModel::mlp(kWidths, 1);
      ReducerOptions options;
      options.limits.cap = 40;
      Reducer reducer(model.parameters, {group}, options);
      step(reducer, model, rank, 0);
      model.zero_grad();
      step(reducer, model, rank, 1);
      model.zero_grad();
      if (rank == 1) way.act(reducer);
      const std::string error = thrown_by([&] { step(reducer, model, rank, 2); });
      EXPECT_NE(error.find("rank 1 requested a new bucket plan"), std::string::npos) << error;
      EXPECT_NE(error.find(way.said), std::string::npos) << error;
      // Recovers when the other ranks do the same.
      if (rank != 1) way.act(reducer);
      for (int number = 3; number < 6; ++number) {
        model.zero_grad();
        step(reducer, model, rank, number);
        if (std::string(way.said).find("hook") == std::string::npos) {
          expect_average(model, number, way.said);
        }
      }
    });
  }
}

TEST(ReducerLeavesPlan, EveryRank_NextBackward_IsRightByTheNewPlan) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp(kWidths, 1);
    Reducer reducer(model.parameters, {group});
    for (int number = 0; number < 6; ++number) {
      model.zero_grad();
      if (number % 2 == 1) reducer.rebuild_buckets();
      step(reducer, model, rank, number);
      expect_average(model, number, "rebuild_buckets() on every rank");
    }
    EXPECT_EQ(reducer.statistics().plans_recorded, 4);
  });
}

class ThrowingHook final : public CommHook {
 public:
  ThrowingHook(Group group, bool* throws) : group_(std::move(group)), throws_(throws) {}
  c10::intrusive_ptr<c10::ivalue::Future> run(GradientBucket& bucket) override {
    if (*throws_) throw std::runtime_error("hook error");
    std::vector<at::Tensor> message{bucket.buffer};
    return group_->allreduce(message)->getFuture()->then(
        [buffer = bucket.buffer](c10::ivalue::Future&) { return c10::IValue(buffer / kWorld); },
        c10::TensorType::get());
  }

 private:
  Group group_;
  bool* throws_;
};

TEST(ReducerException, CommunicationHookThatThrowsOnOneRank_EveryRankThrows_NowAndLater) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp(kWidths, 1);
    Reducer reducer(model.parameters, {group});
    bool throws = false;
    reducer.set_comm_hook(std::make_shared<ThrowingHook>(reducer.communicator(), &throws));
    step(reducer, model, rank, 0);
    model.zero_grad();
    throws = rank == 1;
    EXPECT_NE(thrown_by([&] { step(reducer, model, rank, 1); }), "");
    throws = false;
    EXPECT_NE(thrown_by([&] { step(reducer, model, rank, 2); }).find("restart with"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace apex::parallel
