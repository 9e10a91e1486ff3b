#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <apex/parallel/reducer.h>
#include <support/thread_backend.h>
#include <support/toy_model.h>

// Several reducers that know one parameter. The oracle is the average of the ranks' gradients in float64: reduced
// once, whoever does it, and no message of one reducer meets another's. See Note [One parameter, one reducer].

namespace apex::parallel {
namespace {

using apex::testing::random_batch;
using apex::testing::relative_error;
using apex::testing::run_ranks;
using apex::testing::ToyModel;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kWorld = 2;

at::Tensor forward(Reducer& reducer, const ToyModel& model, const at::Tensor& x) {
  reducer.prepare_for_forward();
  const at::Tensor y = model.forward(x);
  reducer.watch_outputs({y});
  return y;
}

at::Tensor batch(int rank, int number) { return random_batch(5, 4, 10 * number + rank); }

void expect_average(const ToyModel& model, int number, const std::string& where) {
  ToyModel reference = model.clone(at::kDouble);
  for (int rank = 0; rank < kWorld; ++rank) {
    reference.forward(batch(rank, number).to(at::kDouble)).square().mean().backward();
  }
  for (size_t i = 0; i < model.size(); ++i) {
    EXPECT_LT(relative_error(model[i].grad(), reference[i].grad() / kWorld), 1e-5)
        << where << ", step " << number << ", " << model.parameters[i].name;
  }
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
        forward(used, model, batch(rank, number)).square().mean().backward();
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
    forward(older, model, batch(rank, 0)).square().mean().backward();
    auto newer = std::make_unique<Reducer>(model.parameters, std::vector<Group>{group});
    model.zero_grad();
    forward(*newer, model, batch(rank, 1)).square().mean().backward();
    newer.reset();
    for (int number = 2; number < 5; ++number) {
      model.zero_grad();
      forward(older, model, batch(rank, number)).square().mean().backward();
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

TEST(ReducerOwner, BackwardThroughAnOutputOfTheReplacedOne_IsReducedByTheNewOne) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    auto older = std::make_unique<Reducer>(model.parameters, std::vector<Group>{group});
    const at::Tensor loss = forward(*older, model, batch(rank, 0)).square().mean();
    Reducer newer(model.parameters, {group});
    older.reset();
    loss.backward();
    expect_average(model, 0, "through the output of the older");
    EXPECT_EQ(newer.statistics().backwards, 1);
  });
}

/// Destruction is not collective: the newer one is gone on one rank, and not yet on the other.
TEST(ReducerOwner, NewerOneIsGoneOnOneRankOnly_ForwardOfTheOlderOne_TakesItsParametersOver) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel model = ToyModel::mlp({4, 6, 2}, 1);
    Reducer older(model.parameters, {group});
    forward(older, model, batch(rank, 0)).square().mean().backward();
    auto newer = std::make_unique<Reducer>(model.parameters, std::vector<Group>{group});
    model.zero_grad();
    forward(*newer, model, batch(rank, 1)).square().mean().backward();
    if (rank == 1) newer.reset();
    for (int number = 2; number < 6; ++number) {
      model.zero_grad();
      forward(older, model, batch(rank, number)).square().mean().backward();
      expect_average(model, number, "the older again");
      if (number == 3) newer.reset();
    }
  });
}

TEST(ReducerOwner, SharedLayers_TheReducerOfTheLastForward_AveragesThem) {
  run_ranks(kWorld, [](int rank, const Group& group) {
    ToyModel first = ToyModel::mlp({4, 6, 2}, 1);
    ToyModel second = ToyModel::mlp({4, 6, 2}, 2);
    second[0] = first[0];
    second[1] = first[1];
    second.parameters[0].tensor = first[0];
    second.parameters[1].tensor = first[1];
    Reducer one(first.parameters, {group});
    Reducer two(second.parameters, {group});
    for (int number = 0; number < 4; ++number) {
      first.zero_grad();
      second.zero_grad();
      const auto loss = [&](Reducer* a, Reducer* b, const ToyModel& f, const ToyModel& s, const at::Tensor& x) {
        const at::Tensor left = a ? forward(*a, f, x) : f.forward(x);
        const at::Tensor right = b ? forward(*b, s, x) : s.forward(x);
        return left.square().mean() + right.sin().mean();
      };
      loss(&one, &two, first, second, batch(rank, number)).backward();
      ToyModel f = first.clone(at::kDouble), s = second.clone(at::kDouble);
      s.parameters[0].tensor = f[0];
      s.parameters[1].tensor = f[1];
      for (int r = 0; r < kWorld; ++r) loss(nullptr, nullptr, f, s, batch(r, number).to(at::kDouble)).backward();
      for (size_t i = 0; i < first.size(); ++i) {
        EXPECT_LT(relative_error(first[i].grad(), f[i].grad() / kWorld), 1e-5) << number << " first " << i;
        EXPECT_LT(relative_error(second[i].grad(), s[i].grad() / kWorld), 1e-5) << number << " second " << i;
      }
    }
  });
}

}  // namespace
}  // namespace apex::parallel
