// SPDX-License-Identifier: BSD-3-Clause
// Oracles: float64 gradients computed without the message; the same bits, or the same address,
// where a gradient must not change. Ranks are messages whose tensors the test adds up.

#include "reducer/bucket_message.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <support/test_seed.h>

namespace apex::parallel::detail {
namespace {

using Used = std::vector<uint8_t>;

at::Tensor random_like(const at::Tensor& tensor) {
  return at::empty_like(tensor, tensor.options().requires_grad(false))
      .copy_(at::randn(tensor.sizes(), tensor.is_complex() ? at::kComplexDouble : at::kDouble));
}

/// Parameters of every form: dense in several orders, with gaps, a scalar, and an empty one.
std::vector<at::Tensor> parameters_of(at::ScalarType dtype) {
  std::vector<at::Tensor> result{
      at::zeros({3, 5}, dtype),
      at::zeros({2, 3, 4, 4}, dtype).contiguous(at::MemoryFormat::ChannelsLast),
      at::zeros({}, dtype),
      at::zeros({0, 4}, dtype),
      at::zeros({4, 6}, dtype).t(),
      at::zeros({4, 8}, dtype).slice(1, 0, 8, 2),
  };
  for (at::Tensor& parameter : result) parameter.requires_grad_();
  return result;
}

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
  void set_random_gradients() {
    for (at::Tensor& variable : variables) variable.mutable_grad() = random_like(variable);
  }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& variable : variables) {
      copies.push_back(variable.grad().defined() ? variable.grad().clone() : at::Tensor());
    }
    return copies;
  }
};

at::Tensor wide(const at::Tensor& tensor) {
  return tensor.to(tensor.is_complex() ? at::kComplexDouble : at::kDouble);
}

double tolerance_of(at::ScalarType dtype) {
  if (dtype == at::kHalf) return 4e-3;
  if (dtype == at::kBFloat16) return 3e-2;
  return dtype == at::kFloat || dtype == at::kComplexFloat ? 1e-6 : 1e-14;
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                  const std::string& where) {
  ASSERT_TRUE(actual.defined()) << where;
  EXPECT_TRUE(at::allclose(wide(actual), wide(expected), tolerance, tolerance))
      << where << ": " << actual << " instead of " << expected;
}

bool lies_within(const at::Tensor& tensor, const at::Tensor& buffer) {
  const auto* const at = static_cast<const char*>(tensor.const_data_ptr());
  const auto* const begin = static_cast<const char*>(buffer.const_data_ptr());
  return at >= begin && at + tensor.nbytes() <= begin + buffer.nbytes();
}

struct Setting {
  at::ScalarType dtype;
  bool views;
  bool fp32;

  MessageOptions options() const {
    MessageOptions options;
    options.gradient_as_bucket_view = views;
    options.allreduce_always_fp32 = fp32;
    return options;
  }
  std::string name() const {
    return std::string(c10::toString(dtype)) + (views ? ", views" : "") + (fp32 ? ", fp32" : "");
  }
};

std::vector<Setting> every_setting() {
  std::vector<Setting> all;
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat, at::kComplexDouble}) {
    for (const bool views : {false, true}) {
      for (const bool fp32 : {false, true}) all.push_back({dtype, views, fp32});
    }
  }
  return all;
}

TEST(BucketMessage, TwoRanks_PackedSummedAndUnpacked_IsTheScaledSumInEverySetting) {
  at::manual_seed(testing::fresh_seed());
  for (const Setting& setting : every_setting()) {
    Rank one(parameters_of(setting.dtype), setting.options());
    Rank other(parameters_of(setting.dtype), setting.options());
    for (int step = 0; step < 3; ++step) {  // the first step creates the buffer
      const std::string where = setting.name() + ", step " + std::to_string(step);
      one.set_random_gradients();
      other.set_random_gradients();
      const auto mine = one.gradients(), theirs = other.gradients();
      one.message.pack(one.all(), one.all(0), 0.5);
      other.message.pack(other.all(), other.all(0), 0.5);
      EXPECT_EQ(one.message.tensor().scalar_type(), one.message.dtype()) << where;
      if (setting.fp32) {
        EXPECT_NE(c10::elementSize(one.message.dtype()), 2u) << where;
      }
      one.message.tensor().add_(other.message.tensor());
      one.message.unpack(0.25, one.all());
      for (size_t i = 0; i < mine.size(); ++i) {
        const at::Tensor& grad = one.grad(i);
        expect_close(grad, (wide(mine[i]) + wide(theirs[i])) * 0.125, tolerance_of(setting.dtype),
                     where + ", member " + std::to_string(i));
        EXPECT_EQ(grad.scalar_type(), setting.dtype) << where;
        if (grad.is_non_overlapping_and_dense()) {
          EXPECT_EQ(grad.strides(), mine[i].strides()) << where << ", member " << i;
        }
        if (grad.numel() > 0) {
          EXPECT_EQ(lies_within(grad, one.message.gradients_buffer()), setting.views)
              << where << ", member " << i;
        }
      }
    }
  }
}

// Only the reduction shows whether a parameter that this rank did not use is unused on all ranks.
TEST(BucketMessage, UnusedMember_Unpacked_IsAsBeforeOrTheSum) {
  for (const bool views : {false, true}) {
    for (const bool has_gradient : {false, true}) {
      for (const uint8_t used_by_any : {0, 1}) {
        Rank rank({at::zeros({4}).requires_grad_(), at::zeros({4}).requires_grad_()},
                  Setting{at::kFloat, views, false}.options());
        for (const size_t i : {0, 1}) rank.grad(i) = at::full({4}, 3.0);
        rank.message.pack(rank.all(), rank.all(), 1.0);
        rank.message.unpack(1.0, rank.all());
        if (!has_gradient) rank.grad(1) = at::Tensor();
        rank.message.pack({1, 0}, rank.all(), 0.5);
        rank.message.tensor().add_(1.0);  // another rank's contribution
        rank.message.unpack(2.0, {1, used_by_any});
        EXPECT_TRUE(rank.grad(0).equal(at::full({4}, 5.0)));
        ASSERT_EQ(rank.grad(1).defined(), has_gradient || used_by_any != 0);
        if (!rank.grad(1).defined()) continue;
        const double expected = used_by_any == 0 ? 3.0 : has_gradient ? 5.0 : 2.0;
        EXPECT_TRUE(rank.grad(1).equal(at::full({4}, expected))) << views << has_gradient;
      }
    }
  }
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

// A rank that cannot take part sends this instead of its gradients, which it keeps.
TEST(BucketMessage, Blank_HasTheFormOfTheMessageAndNoneOfItsValues) {
  at::manual_seed(testing::fresh_seed());
  for (const Setting& setting : every_setting()) {
    for (const bool poison : {false, true}) {
      Rank rank(parameters_of(setting.dtype), setting.options());
      rank.set_random_gradients();
      const auto before = rank.gradients();
      for (size_t i = 0; i < before.size(); ++i) rank.message.put(i, false);
      rank.message.blank(poison);
      const at::Tensor& blank = rank.message.tensor();
      EXPECT_EQ(blank.numel(), rank.message.numel()) << setting.name();
      EXPECT_EQ(blank.scalar_type(), rank.message.dtype()) << setting.name();
      EXPECT_TRUE((poison ? blank.isnan() : blank.eq(0)).all().item<bool>()) << setting.name();
      rank.message.abandon();
      for (size_t i = 0; i < before.size(); ++i)
        EXPECT_TRUE(rank.grad(i).equal(before[i])) << setting.name() << ", member " << i;
    }
  }
}

// A hook, or a further gradient of the same backward, changes .grad after it was copied.
TEST(BucketMessage, GradientChangedAfterPut_Average_IsOfTheChangedOne) {
  for (const Setting& setting : every_setting()) {
    for (const bool replaced : {false, true}) {
      Rank rank({at::zeros({3}, setting.dtype).requires_grad_()}, setting.options());
      rank.grad(0) = at::full({3}, 2.0, setting.dtype);
      const at::Tensor own = rank.grad(0);
      rank.message.put(0, /*kept=*/true);
      EXPECT_TRUE(rank.grad(0).equal(at::full({3}, 2.0, setting.dtype))) << setting.name();
      if (replaced) {
        rank.grad(0) = at::full({3}, 8.0, setting.dtype);
      } else {
        rank.grad(0).add_(6.0);
        rank.message.put(0, /*kept=*/true);
      }
      rank.message.pack({1}, {1}, 0.5);
      EXPECT_EQ(rank.message.copied(), replaced ? 2 : 1);
      rank.message.unpack(0.5, rank.all());
      EXPECT_TRUE(rank.grad(0).equal(at::full({3}, 2.0, setting.dtype))) << setting.name();
      EXPECT_EQ(rank.grad(0).is_same(own), !setting.views) << setting.name();
    }
  }
}

// An abandoned collective may write to its memory at any time.
TEST(BucketMessage, AbandonedInFlight_LateWritesReachNoGradient_AndTheNextStepIsRight) {
  for (const bool views : {false, true}) {
    Rank rank({at::zeros({4}).requires_grad_()}, Setting{at::kFloat, views, false}.options());
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
  Rank rank({at::zeros({4}).requires_grad_(), at::zeros({4}).requires_grad_()},
            Setting{at::kFloat, true, false}.options());
  rank.set_random_gradients();
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
