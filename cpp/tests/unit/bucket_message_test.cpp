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

// In half, a small gradient divided by the number of ranks underflows to zero, and a sum of large
// ones overflows.
TEST(BucketMessage, LowPrecisionSummedInFloat32_NeitherUnderflowsNorOverflows) {
  for (const bool views : {false, true}) {
    Rank rank({at::zeros({2}, at::kHalf).requires_grad_()},
              Setting{at::kHalf, views, true}.options());
    const double smallest = std::ldexp(1.0, -24);
    rank.grad(0) = at::tensor({smallest, 60000.0}, at::kDouble).to(at::kHalf);
    rank.message.pack({1}, {1}, 1.0 / 8);
    EXPECT_EQ(rank.message.tensor()[0].item<double>(), smallest / 8);
    rank.message.tensor().mul_(64);
    EXPECT_EQ(rank.message.tensor()[1].item<double>(), 60000.0 * 8);
    rank.message.unpack(1.0 / 8, rank.all());
    EXPECT_EQ(rank.grad(0).scalar_type(), at::kHalf);
    EXPECT_EQ(rank.grad(0)[0].item<double>(), smallest);
    EXPECT_EQ(rank.grad(0)[1].item<double>(), 60000.0);
  }
}

// Only the reduction shows whether a parameter that this rank did not use is unused on all ranks.
TEST(BucketMessage, UnusedMember_Unpacked_IsAsBeforeOrTheSum) {
  at::manual_seed(testing::fresh_seed());
  for (const Setting& setting : every_setting()) {
    for (const bool has_gradient : {false, true}) {
      for (const uint8_t used_by_any : {0, 1}) {
        const std::string where = setting.name() + (has_gradient ? ", kept" : ", none") +
                                  (used_by_any != 0 ? ", used elsewhere" : "");
        Rank rank(parameters_of(setting.dtype), setting.options());
        rank.set_random_gradients();
        rank.message.pack(rank.all(), rank.all(0), 1.0);
        rank.message.unpack(1.0, rank.all());
        if (!has_gradient) rank.grad(1) = at::Tensor();
        rank.grad(0) = random_like(rank.variables[0]);
        const auto before = rank.gradients();
        Used used = rank.all();
        used[1] = 0;
        rank.message.pack(used, rank.all(), 0.5);
        rank.message.tensor().add_(1.0);  // another rank's contribution
        Used by_any = used;
        by_any[1] = used_by_any;
        rank.message.unpack(2.0, by_any);
        const auto sum_of = [&](const at::Tensor& grad) {
          const at::Tensor others = grad.is_complex()
                                        ? at::full_like(wide(grad), c10::complex<double>(1, 1))
                                        : at::ones_like(wide(grad));
          return (wide(grad) * 0.5 + others) * 2;
        };
        const double tolerance = tolerance_of(setting.dtype);
        expect_close(rank.grad(0), sum_of(before[0]), tolerance, where);
        if (used_by_any != 0) {
          const at::Tensor own = has_gradient ? before[1] : at::zeros_like(rank.variables[1]);
          expect_close(rank.grad(1), sum_of(own.detach()), tolerance, where);
          EXPECT_EQ(rank.grad(1).strides(), rank.variables[1].strides()) << where;
        } else if (has_gradient) {
          EXPECT_TRUE(rank.grad(1).equal(before[1])) << where;
        } else {
          EXPECT_FALSE(rank.grad(1).defined()) << where;
        }
      }
    }
  }
}

// With views, a gradient may be replaced by any other part of the buffer before the next backward.
TEST(BucketMessage, GradientsThatLieElsewhereInTheBuffer_Packed_AreWhatTheyHold) {
  for (const bool early : {false, true}) {
    Rank rank({at::zeros({4, 4}).requires_grad_(), at::zeros({4, 4}).requires_grad_()},
              Setting{at::kFloat, true, false}.options());
    at::manual_seed(testing::fresh_seed());
    rank.set_random_gradients();
    rank.message.pack(rank.all(), rank.all(), 1.0);
    rank.message.unpack(1.0, rank.all());
    const at::Tensor first = rank.grad(0), second = rank.grad(1);
    const at::Tensor was_first = first.clone(), was_second = second.clone();
    rank.grad(0) = second.t();
    rank.grad(1) = first;
    if (early) {
      rank.message.put(0, true);
      rank.message.put(1, true);
    }
    rank.message.pack(rank.all(), rank.all(), 2.0);
    rank.message.unpack(0.5, rank.all());
    EXPECT_TRUE(rank.grad(0).equal(was_second.t())) << early;
    EXPECT_TRUE(rank.grad(1).equal(was_first)) << early;
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

TEST(BucketMessage, Tail_TravelsBehindTheGradients_AndIsNotScaled) {
  at::manual_seed(testing::fresh_seed());
  for (const Setting& setting : every_setting()) {
    MessageOptions options = setting.options();
    options.tail = 5;
    Rank rank(parameters_of(setting.dtype), options);
    for (int step = 0; step < 3; ++step) {
      rank.set_random_gradients();
      const auto before = rank.gradients();
      rank.message.pack(rank.all(), rank.all(0), 0.5);
      const at::Tensor tensor = rank.message.tensor(), tail = rank.message.tail_of(tensor);
      EXPECT_EQ(tensor.numel(), rank.message.numel() + 5);
      tail.copy_(at::arange(5));
      tensor.mul_(4);
      rank.message.unpack(0.25, rank.all());
      EXPECT_TRUE(
          rank.message.tail_of(rank.message.tensor()).eq(at::arange(5) * 4).all().item<bool>())
          << setting.name();
      for (size_t i = 0; i < before.size(); ++i)
        expect_close(rank.grad(i), wide(before[i]) * 0.5, tolerance_of(setting.dtype),
                     setting.name());
      EXPECT_EQ(rank.message.gradients_buffer().numel(), rank.message.numel());
    }
    rank.message.blank(/*poison=*/false);
    EXPECT_EQ(rank.message.tensor().numel(), rank.message.numel() + 5);
  }
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

// A program keeps gradients of earlier steps, which must keep their values.
TEST(BucketMessage, GradientsThatAreStillHeld_NextBackward_KeepTheirValues) {
  for (const bool early : {false, true}) {
    for (const bool views : {false, true}) {
      Rank rank({at::zeros({4}).requires_grad_(), at::zeros({4}).requires_grad_()},
                Setting{at::kFloat, views, false}.options());
      at::Tensor held;
      const void* place = nullptr;
      for (const double value : {1.0, 2.0, 3.0, 4.0}) {
        for (const size_t i : {0, 1}) rank.grad(i) = at::full({4}, value);
        for (const size_t i : {0, 1}) {
          if (early) rank.message.put(i, false);
        }
        rank.message.pack(rank.all(), rank.all(0), 1.0);
        rank.message.unpack(1.0, rank.all());
        if (held.defined()) {
          EXPECT_TRUE(held.equal(at::full({4}, value - 1)));
        }
        const void* const now = rank.message.gradients_buffer().const_data_ptr();
        if (value == 2.0 || value == 4.0) {
          EXPECT_EQ(now != place, views && value == 4.0) << "a new buffer only if one is held";
        }
        place = now;
        held = value == 3.0 ? rank.grad(1) : at::Tensor();
      }
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

// Autograd creates zeros without memory. They must be replaced by a gradient that can be written.
TEST(BucketMessage, GradientWithoutMemory_IsZerosAndBecomesTheSum) {
  for (const bool views : {false, true}) {
    MessageOptions options;
    options.gradient_as_bucket_view = views;
    Rank rank({at::zeros({3}, at::kFloat).requires_grad_()}, options);
    rank.grad(0) = at::_efficientzerotensor({3}, at::kFloat);
    rank.message.put(0, false);
    rank.message.pack(rank.all(), rank.all(0), 1.0);
    EXPECT_TRUE(rank.message.tensor().eq(0).all().item<bool>());
    rank.message.tensor().fill_(5.0);
    rank.message.unpack(0.5, rank.all());
    EXPECT_TRUE(rank.grad(0).eq(2.5).all().item<bool>());
  }
}

}  // namespace
}  // namespace apex::parallel::detail
