// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <apex/parallel/reducer.h>
#include <support/reducer_steps.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

// Several reducers that share a parameter. Oracle: the float64 average of the ranks' gradients,
// reduced once by whichever reducer. No message of one reducer may match another's. See
// Note [One parameter, one reducer].

namespace apex::parallel {
namespace {

using apex::testing::batch;
using apex::testing::expect_mean_of;
using apex::testing::forward;
using apex::testing::loss_of;
using apex::testing::run_ranks;
using apex::testing::thrown_by;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kWorld = 2;

void expect_average(const ToyModel& model, int number, const std::string& where) {
  apex::testing::expect_average(model, kWorld, number, where);
}

/// A model with the first layer of another model.
ToyModel sharing(ToyModel model, const ToyModel& other) {
  for (size_t i = 0; i < 2; ++i) model[i] = other[i];
  return model;
}

TEST(ReducerOwner, TwoReducersOfOneModel_EitherForward_GradientsAreAveragedOnce) {
  for (const bool views : {true, false}) {
    run_ranks(kWorld, [&](int rank, const Group& group) {
      ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
      ReducerOptions options;
      options.gradient_as_bucket_view = views;
      Reducer older(model.parameters, {group}, options);
      Reducer newer(model.parameters, {group}, options);
      for (int number = 0; number < 6; ++number) {
        model.zero_grad();
        Reducer& used = number % 2 == 0 ? newer : older;
        loss_of(forward(used, model, batch(rank, number))).backward();
        expect_average(model, number, number % 2 == 0 ? "the newer" : "the older");
      }
      EXPECT_EQ(older.statistics().backwards, 3);
      EXPECT_EQ(newer.statistics().backwards, 3);
    });
  }
}

TEST(ReducerOwner, NewerOneIsDestroyed_TheOlderOne_TakesItsParametersOver) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    Reducer older(model.parameters, {group});
    loss_of(forward(older, model, batch(rank, 0))).backward();
    auto newer = std::make_unique<Reducer>(model.parameters, std::vector<Group>{group});
    model.zero_grad();
    loss_of(forward(*newer, model, batch(rank, 1))).backward();
    newer.reset();
    for (int number = 2; number < 5; ++number) {
      model.zero_grad();
      loss_of(forward(older, model, batch(rank, number))).backward();
      expect_average(model, number, "the older again");
    }
  });
}

TEST(ReducerOwner, ReplacedOneIsHeldByAnOutputOnOneRank_NextSteps_AreRight) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    std::vector<at::Tensor> held;
    for (int number = 0; number < 6; ++number) {
      Reducer reducer(model.parameters, {group});
      for (int again = 0; again < 2; ++again) {
        model.zero_grad();
        const at::Tensor loss = forward(reducer, model, batch(rank, number)).square().mean();
        if (rank == 0) held.push_back(loss);
        loss.backward();
        expect_average(model, number, "while outputs of older ones are held");
      }
    }
  });
}

TEST(ReducerOwner, BackwardThroughAnOutputOfTheReplacedOne_IsAveragedOnce) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    auto older = std::make_unique<Reducer>(model.parameters, std::vector<Group>{group});
    const at::Tensor loss = forward(*older, model, batch(rank, 0)).square().mean();
    Reducer newer(model.parameters, {group});
    older.reset();
    loss.backward();
    expect_average(model, 0, "through the output of the older");
    for (int number = 1; number < 3; ++number) {
      model.zero_grad();
      loss_of(forward(newer, model, batch(rank, number))).backward();
      expect_average(model, number, "the newer");
    }
  });
}

/// Destruction is not collective: the newer reducer is destroyed on one rank but not yet on the
/// other.
TEST(ReducerOwner, NewerOneIsGoneOnOneRankOnly_ForwardOfTheOlderOne_TakesItsParametersOver) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    Reducer older(model.parameters, {group});
    loss_of(forward(older, model, batch(rank, 0))).backward();
    auto newer = std::make_unique<Reducer>(model.parameters, std::vector<Group>{group});
    model.zero_grad();
    loss_of(forward(*newer, model, batch(rank, 1))).backward();
    if (rank == 1) newer.reset();
    for (int number = 2; number < 6; ++number) {
      model.zero_grad();
      loss_of(forward(older, model, batch(rank, number))).backward();
      expect_average(model, number, "the older again");
      if (number == 3) newer.reset();
    }
  });
}

TEST(ReducerOwner, SharedLayers_OneBackwardThroughBoth_GradientsAreAveragedOnce) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel first = ToyModel::mlp({4, 6, 2}, 1);
    ToyModel second = sharing(ToyModel::mlp({4, 6, 2}, 2), first);
    Reducer one(first.parameters, {group});
    Reducer two(second.parameters, {group});
    for (int number = 0; number < 4; ++number) {
      first.zero_grad();
      second.zero_grad();
      const auto loss = [&](Reducer* a, Reducer* b, const ToyModel& f, const ToyModel& s,
                            const at::Tensor& x) {
        const at::Tensor left = a ? forward(*a, f, x) : f.forward(x);
        const at::Tensor right = b ? forward(*b, s, x) : s.forward(x);
        return left.square().mean() + right.sin().mean();
      };
      loss(&one, &two, first, second, batch(rank, number)).backward();
      ToyModel f = first.clone(at::kDouble);
      ToyModel s = sharing(second.clone(at::kDouble), f);
      for (int r = 0; r < kWorld; ++r)
        loss(nullptr, nullptr, f, s, batch(r, number).to(at::kDouble)).backward();
      expect_mean_of(first, f, kWorld, "first, step " + std::to_string(number));
      expect_mean_of(second, s, kWorld, "second, step " + std::to_string(number));
    }
  });
}

/// Ranks run forwards in different orders, and one runs more of them. Only the graph is the same.
TEST(ReducerOwner, ForwardsInAnotherOrderOnEachRank_GradientsAreAveragedOnce) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel first = ToyModel::mlp({4, 6, 2}, 1);
    ToyModel second = sharing(ToyModel::mlp({4, 6, 2}, 2), first);
    Reducer one(first.parameters, {group});
    Reducer two(second.parameters, {group});
    for (int number = 0; number < 6; ++number) {
      first.zero_grad();
      second.zero_grad();
      at::Tensor left, right;
      if (rank == 0) left = forward(one, first, batch(rank, number));
      right = forward(two, second, batch(rank, number));
      if (rank == 1) left = forward(one, first, batch(rank, number));
      if (number % 2 == 1) one.prepare_for_forward();  // an evaluation
      (number % 3 == 2 ? loss_of(left) : loss_of(left) + right.sin().mean()).backward();
      ToyModel f = first.clone(at::kDouble);
      ToyModel s = sharing(second.clone(at::kDouble), f);
      for (int r = 0; r < kWorld; ++r) {
        const at::Tensor x = batch(r, number).to(at::kDouble);
        (number % 3 == 2 ? loss_of(f.forward(x))
                         : loss_of(f.forward(x)) + s.forward(x).sin().mean())
            .backward();
      }
      expect_mean_of(first, f, kWorld, "first, step " + std::to_string(number));
      if (number % 3 != 2)
        expect_mean_of(second, s, kWorld, "second, step " + std::to_string(number));
    }
  });
}

/// One rank does not use a shared layer, and backward goes through one of the two reducers that
/// share it. That reducer then owns the layer on every rank. See
/// Note [One backward, all its reducers].
TEST(ReducerOwner, OneRankDoesNotUseTheSharedLayer_BackwardThroughTheOther_IsAveraged) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel first = ToyModel::mlp({4, 6, 2}, 1);
    ToyModel second = sharing(ToyModel::mlp({4, 6, 2}, 2), first);
    Reducer one(first.parameters, {group});
    Reducer two(second.parameters, {group});
    // Rank 0 uses only the last layer of the first model.
    const auto run = [](int r, const ToyModel& f, const at::Tensor& x) {
      const at::Tensor hidden = at::cat({x, x}, 1).narrow(1, 0, 6);
      return r == 0 ? at::linear(hidden.to(f[2].scalar_type()), f[2], f[3]) : f.forward(x);
    };
    for (int number = 0; number < 4; ++number) {
      first.zero_grad();
      second.zero_grad();
      one.prepare_for_forward();
      const at::Tensor left = run(rank, first, batch(rank, number));
      one.watch_outputs({left});
      const at::Tensor right = forward(two, second, batch(rank, number));
      loss_of(left).backward();
      ToyModel reference = first.clone(at::kDouble);
      for (int r = 0; r < kWorld; ++r)
        loss_of(run(r, reference, batch(r, number).to(at::kDouble))).backward();
      expect_mean_of(first, reference, kWorld, "first, step " + std::to_string(number));
      EXPECT_FALSE(second[2].grad().defined()) << "no rank has used it";
      first.zero_grad();
      loss_of(right).backward();
      expect_average(second, number, "the other loss");
    }
  });
}

/// The graph contains all outputs, including those that this rank did not reach, so none was
/// skipped.
TEST(ReducerOwner, ExceptionBeforeTheOutputsOfAnotherReducer_ItsNextStep_IsNotOutOfStep) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    Reducer older(model.parameters, {group});
    Reducer newer(model.parameters, {group});
    bool fail = rank == 1;
    const at::Tensor first = forward(newer, model, batch(rank, 0));
    at::Tensor second = forward(older, model, batch(rank, 0)).mul(1);
    second.register_hook([&](const at::Tensor&) -> void {
      if (fail) throw std::runtime_error("user error");
    });
    // Nodes run from last to first: the hook's node after the older reducer's output and before the
    // newer one's.
    const at::Tensor again = forward(older, model, batch(rank, 0));
    const std::string error =
        thrown_by([&] { (loss_of(first) + loss_of(second) + loss_of(again)).backward(); });
    EXPECT_FALSE(error.empty());
    fail = false;
    for (int number = 1; number < 4; ++number) {
      model.zero_grad();
      loss_of(forward(newer, model, batch(rank, number))).backward();
      expect_average(model, number, "the newer");
    }
  });
}

/// The first output that backward reaches starts it for all reducers in the graph, so each of them
/// sees the exception.
TEST(ReducerOwner, ExceptionBeforeTheSecondReducerIsReached_EveryRankThrows_AndTheNextStepIsRight) {
  // Also if both use one group, whose messages have one order: see Note [Several reducers on one
  // channel].
  for (const auto& [recording, shares] : std::vector<std::pair<bool, bool>>{
           {true, false}, {false, false}, {true, true}, {false, true}}) {
    const auto second = apex::testing::ThreadBackendControl::create(kWorld);
    run_ranks(kWorld, [&, recording = recording, shares = shares](int rank, const Group& group) {
      ToyModel front = ToyModel::mlp({4, 6, 4}, 1);
      ToyModel back = ToyModel::mlp({4, 6, 2}, 2);
      Reducer one(front.parameters, {group});
      Reducer two(back.parameters,
                  {shares ? group : apex::testing::make_thread_group(rank, second)});
      const int fails_in = recording ? 0 : 2;
      bool fail = false;
      back[0].register_hook([&](const at::Tensor&) -> void {
        if (fail) throw std::runtime_error("user error");
      });
      for (int number = 0; number < fails_in + 4; ++number) {
        front.zero_grad();
        back.zero_grad();
        fail = number == fails_in && rank == 1;
        const std::string error = thrown_by([&] {
          loss_of(forward(two, back, forward(one, front, batch(rank, number)))).backward();
        });
        if (number == fails_in) {
          EXPECT_FALSE(error.empty());
          continue;
        }
        EXPECT_EQ(error, "");
        ToyModel f = front.clone(at::kDouble);
        ToyModel b = back.clone(at::kDouble);
        for (int r = 0; r < kWorld; ++r) {
          loss_of(b.forward(f.forward(batch(r, number).to(at::kDouble)))).backward();
        }
        expect_mean_of(front, f, kWorld, "front, step " + std::to_string(number));
        expect_mean_of(back, b, kWorld, "back, step " + std::to_string(number));
      }
    });
  }
}

/// Layers of equal size, so that swapped messages would fit. Messages for layers that a rank leaves
/// out are sent at the end. Without Note [Several reducers on one channel], they would follow the
/// other reducer's buckets.
TEST(ReducerOwner, TwoReducersOnOneGroup_LayersLeftOutOnSomeRanks_GradientsAreTheirOwnAverages) {
  constexpr int kRanks = 3;
  run_ranks(kRanks, [](int rank, const Group& group) {
    const std::vector<int64_t> widths{4, 4, 4, 4};
    ToyModel front = ToyModel::mlp(widths, 1);
    ToyModel back = ToyModel::mlp(widths, 2);
    ReducerOptions options;
    options.limits.cap = options.limits.first_cap = 1;  // one bucket per parameter
    Reducer one(front.parameters, {group}, options);
    Reducer two(back.parameters, {group}, options);
    const std::vector<std::vector<size_t>> used{{0, 1, 2}, {0, 2}, {1}};
    for (int number = 0; number < 6; ++number) {
      const auto through = [&](int r, const ToyModel& model, at::Tensor x) {
        for (const size_t layer : used[(r + number) % kRanks])
          x = x + at::tanh(at::linear(x, model[2 * layer], model[2 * layer + 1]));
        return x;
      };
      front.zero_grad();
      back.zero_grad();
      two.prepare_for_forward();
      const at::Tensor y = through(rank, back, forward(one, front, batch(rank, number)));
      two.watch_outputs({y});
      loss_of(y).backward();
      ToyModel f = front.clone(at::kDouble);
      ToyModel b = back.clone(at::kDouble);
      for (int r = 0; r < kRanks; ++r)
        loss_of(through(r, b, f.forward(batch(r, number).to(at::kDouble)))).backward();
      expect_mean_of(front, f, kRanks, "front, step " + std::to_string(number));
      expect_mean_of(back, b, kRanks, "back, step " + std::to_string(number));
    }
    EXPECT_GT(one.statistics().launched_in_backward, 0);
    EXPECT_GT(two.statistics().launched_in_backward, 0);
  });
}

}  // namespace
}  // namespace apex::parallel
