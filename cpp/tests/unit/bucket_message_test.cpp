// SPDX-License-Identifier: BSD-3-Clause
// Who may write a gradient's memory, and when. Values in every dtype and layout: ReducerModes, and
// python/tests/ddp_programs.py.

#include "reducer/bucket_message.h"

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace apex::parallel::detail {
namespace {

using Used = std::vector<uint8_t>;

/// A message of one rank and its state.
struct Rank {
  std::vector<at::Tensor> variables;
  BucketMessage message;

  explicit Rank(std::vector<at::Tensor> parameters, const MessageOptions& options = {})
      : variables(std::move(parameters)), message(indices(), variables, at::kCPU, options) {}

  std::vector<int64_t> indices() const {
    std::vector<int64_t> all;
    for (size_t i = 0; i < variables.size(); ++i) all.push_back(static_cast<int64_t>(i));
    return all;
  }
  Used all(uint8_t value = 1) const { return Used(variables.size(), value); }
  at::Tensor& grad(size_t i) { return variables[i].mutable_grad(); }
};

bool lies_within(const at::Tensor& tensor, const at::Tensor& buffer) {
  const auto* const at = static_cast<const char*>(tensor.const_data_ptr());
  const auto* const begin = static_cast<const char*>(buffer.const_data_ptr());
  return at >= begin && at + tensor.nbytes() <= begin + buffer.nbytes();
}

MessageOptions with_views(bool views) {
  MessageOptions options;
  options.gradient_as_bucket_view = views;
  return options;
}

// Note [Gradients in their bucket]: a gradient that this backward has created may be shared.
// One that existed before is the caller's, who expects it to be written.
TEST(BucketMessage, GradientWhoseMemoryHasAnotherOwner_Unpacked_IsWrittenOnlyIfItWasThereBefore) {
  for (const bool kept : {false, true}) {
    Rank rank({at::zeros({6}).requires_grad_()});
    rank.grad(0) = at::full({6}, 4.0);
    const at::Tensor owner = rank.grad(0).view({2, 3});
    rank.message.pack({1}, {static_cast<uint8_t>(kept)}, 0.5);
    EXPECT_EQ(rank.message.copied(), 1);
    rank.message.unpack(1.0, rank.all());
    EXPECT_TRUE(rank.grad(0).equal(at::full({6}, 2.0)));
    EXPECT_TRUE(owner.equal(at::full({2, 3}, kept ? 2.0 : 4.0))) << kept;
  }
}

TEST(BucketMessage, GradientsOfWholeVectors_AreAligned) {
  const auto of_size = [](int64_t numel) { return at::zeros({numel}).requires_grad_(); };
  Rank rank({of_size(3), of_size(8), of_size(4)}, with_views(true));
  rank.message.pack(rank.all(0), rank.all(0), 1.0);
  rank.message.unpack(1.0, rank.all());
  for (const size_t i : {1, 2})
    EXPECT_EQ(reinterpret_cast<uintptr_t>(rank.grad(i).const_data_ptr()) % 16, 0U) << i;
}

TEST(BucketMessage, GradientInItsPlaceThatNoRankUsed_StaysAsItWas) {
  Rank rank({at::zeros({3}).requires_grad_()}, with_views(true));
  rank.grad(0) = at::full({3}, 2.0);
  rank.message.pack({1}, {0}, 1.0);
  rank.message.unpack(1.0, {1});
  rank.message.pack({0}, {1}, 0.5);  // sent, since a parameter beside it may have been used
  EXPECT_TRUE(rank.grad(0).equal(at::full({3}, 1.0)));
  rank.message.unpack(1.0, {0});
  EXPECT_TRUE(rank.grad(0).equal(at::full({3}, 2.0)));
}

TEST(BucketMessage, GradientWithHistory_Unpacked_HistoryKeepsItsValue) {
  Rank rank({at::full({3}, 2.0).requires_grad_()});
  const at::Tensor with_history = rank.variables[0] * 2;  // as from backward(create_graph=True)
  rank.grad(0) = with_history;
  rank.message.pack({1}, {1}, 0.5);
  rank.message.unpack(0.5, rank.all());
  EXPECT_TRUE(rank.grad(0).equal(at::full({3}, 1.0)));
  EXPECT_FALSE(rank.grad(0).requires_grad());
  EXPECT_TRUE(with_history.equal(at::full({3}, 4.0)));
}

// A hook, or a further gradient of the same backward, changes .grad after it was copied.
TEST(BucketMessage, GradientChangedAfterPut_Average_IsOfTheChangedOne) {
  for (const bool views : {false, true}) {
    for (const bool replaced : {false, true}) {
      Rank rank({at::zeros({3}).requires_grad_()}, with_views(views));
      rank.grad(0) = at::full({3}, 2.0);
      const at::Tensor own = rank.grad(0);
      rank.message.put(0, /*kept=*/true);
      EXPECT_TRUE(rank.grad(0).equal(at::full({3}, 2.0)));
      if (replaced) {
        rank.grad(0) = at::full({3}, 8.0);
      } else {
        rank.grad(0).add_(6.0);
        rank.message.put(0, /*kept=*/true);
      }
      rank.message.pack({1}, {1}, 0.5);
      EXPECT_EQ(rank.message.copied(), replaced ? 2 : 1);
      rank.message.unpack(0.5, rank.all());
      EXPECT_TRUE(rank.grad(0).equal(at::full({3}, 2.0)));
      EXPECT_EQ(rank.grad(0).is_same(own), !views);
    }
  }
}

// An abandoned collective may write to its memory at any time.
TEST(BucketMessage, AbandonedInFlight_LateWritesReachNoGradient_AndTheNextStepIsRight) {
  for (const bool views : {false, true}) {
    Rank rank({at::zeros({4}).requires_grad_()}, with_views(views));
    rank.grad(0) = at::full({4}, 3.0);
    rank.message.pack({1}, {1}, 1.0);
    rank.message.unpack(1.0, rank.all());  // from now on gradients are views if enabled
    rank.message.pack({1}, {1}, 1.0);
    const at::Tensor in_flight = rank.message.tensor();
    rank.message.abandon();
    in_flight.fill_(NAN);
    EXPECT_FALSE(rank.message.tensor().defined());
    if (views) {
      EXPECT_FALSE(rank.grad(0).defined());
    } else {
      EXPECT_TRUE(rank.grad(0).equal(at::full({4}, 3.0)));
    }
    rank.grad(0) = at::full({4}, 5.0);
    rank.message.pack({1}, {1}, 1.0);
    in_flight.fill_(NAN);
    rank.message.unpack(1.0, rank.all());
    EXPECT_TRUE(rank.grad(0).equal(at::full({4}, 5.0)));
  }
}

TEST(BucketMessage, AbandonedBeforePack_GradientsAreTheRanksOwn) {
  Rank rank({at::zeros({4}).requires_grad_(), at::zeros({4}).requires_grad_()}, with_views(true));
  for (const size_t i : {0, 1}) rank.grad(i) = at::ones({4});
  rank.message.pack(rank.all(), rank.all(), 1.0);
  rank.message.unpack(1.0, rank.all());
  const at::Tensor buffer = rank.message.gradients_buffer();
  rank.grad(1).fill_(7.0);
  rank.grad(0) = at::full({4}, 3.0);
  rank.message.put(0, false);
  EXPECT_TRUE(lies_within(rank.grad(0), rank.message.gradients_buffer()));
  rank.message.abandon();
  EXPECT_TRUE(rank.grad(0).equal(at::full({4}, 3.0)));
  EXPECT_TRUE(rank.grad(1).equal(at::full({4}, 7.0)));
  rank.message.pack(rank.all(), rank.all(), 0.5);
  EXPECT_FALSE(rank.message.gradients_buffer().storage().is_alias_of(buffer.storage()));
  rank.message.unpack(1.0, rank.all());
  EXPECT_TRUE(rank.grad(0).equal(at::full({4}, 1.5)));
  EXPECT_TRUE(rank.grad(1).equal(at::full({4}, 3.5)));
}

}  // namespace
}  // namespace apex::parallel::detail
