// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <apex/amp.h>
#include <apex/error.h>
#include <support/thread_backend.h>

#include <limits>
#include <sstream>
#include <vector>

namespace apex::amp {
namespace {

using apex::testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

LossScalerOptions options(double scale, int64_t interval = 2000) {
  LossScalerOptions result;
  result.init_scale(scale);
  result.growth_interval(interval);
  return result;
}

/// One update with a gradient that holds `value`.
void update_with(LossScaler& scaler, float value) {
  scaler.unscale_({at::full({3}, value)});
  scaler.update();
}

TEST(LossScaler, Scale_HalfLoss_IsFloat32AndDifferentiable) {
  LossScaler scaler(options(8));
  at::Tensor loss = at::full({}, 1.5, at::kHalf).requires_grad_();
  const at::Tensor scaled = scaler.scale(loss);
  EXPECT_EQ(scaled.scalar_type(), at::kFloat);
  EXPECT_EQ(scaled.dim(), 0);
  EXPECT_EQ(scaled.item<float>(), 12);
  scaled.backward();
  EXPECT_EQ(loss.grad().item<float>(), 8);
}

TEST(LossScaler, Scale_UpdateBeforeBackward_BackwardUsesTheScaleOfForward) {
  LossScaler scaler(options(8));
  at::Tensor loss = at::full({}, 1.0).requires_grad_();
  const at::Tensor scaled = scaler.scale(loss);
  update_with(scaler, kInf);
  scaled.backward();
  EXPECT_EQ(loss.grad().item<float>(), 8);
}

TEST(LossScaler, Unscale_MixedDtypes_DividesEachInPlace) {
  LossScaler scaler(options(4));
  std::vector<at::Tensor> grads;
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kFloat}) {
    grads.push_back(at::full({2, 3}, 6, dtype));
  }
  const std::vector<at::Tensor> same = grads;
  scaler.unscale_(grads);
  for (const at::Tensor& grad : same) {
    EXPECT_TRUE(at::equal(grad, at::full({2, 3}, 1.5, grad.options())));
  }
  EXPECT_FALSE(scaler.overflowed());
}

TEST(LossScaler, Unscale_SparseCoalesced_DividesStoredValues) {
  LossScaler scaler(options(2));
  const at::Tensor dense = at::tensor({0.f, 4.f, 0.f, 6.f});
  const at::Tensor sparse = dense.to_sparse();
  scaler.unscale_({sparse});
  EXPECT_TRUE(at::equal(sparse.to_dense(), dense / 2));
  EXPECT_THROW(scaler.unscale_({sparse + sparse, at::ones({2}).to_sparse()._coalesced_(false)}),
               InvalidArgument);
}

TEST(LossScaler, Unscale_IntegerGradient_ThrowsAndChangesNothing) {
  LossScaler scaler(options(2));
  const at::Tensor first = at::ones({2});
  EXPECT_THROW(scaler.unscale_({first, at::ones({2}, at::kLong)}), InvalidArgument);
  EXPECT_TRUE(at::equal(first, at::ones({2})));
}

TEST(LossScaler, Unscale_NothingEmptyOrUndefined_PassesOverIt) {
  LossScaler scaler;
  scaler.unscale_({});
  const at::Tensor grad = at::full({2}, 65536.0F);
  scaler.unscale_({at::Tensor(), grad, at::empty({0})});
  EXPECT_TRUE(grad.eq(1).all().item<bool>());
  EXPECT_FALSE(scaler.overflowed());
}

TEST(LossScaler, Overflow_InfOrNanAnywhere_BacksOffAndRestartsTheCounter) {
  for (const float bad : {kInf, -kInf, kNan}) {
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      LossScaler scaler(options(64));
      update_with(scaler, 1);
      EXPECT_EQ(scaler.growth_tracker(), 1);
      at::Tensor grad = at::ones({1000}, dtype);
      grad[999].fill_(bad);
      scaler.unscale_({at::ones({2}), grad});
      EXPECT_TRUE(scaler.overflowed());
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 32);
      EXPECT_EQ(scaler.growth_tracker(), 0);
      EXPECT_FALSE(scaler.overflowed());
    }
  }
}

TEST(LossScaler, Growth_IntervalOfCleanUpdates_DoublesOnceAndCountsAnew) {
  LossScaler scaler(options(16, /*interval=*/3));
  std::vector<double> scales;
  for (int i = 0; i < 7; ++i) {
    update_with(scaler, 1);
    scales.push_back(scaler.get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{16, 16, 32, 32, 32, 64, 64}));
  EXPECT_EQ(scaler.growth_tracker(), 1);
}

TEST(LossScaler, Step_CleanOrOverflowed_UnscalesOnceAndStepsOrNot) {
  at::Tensor parameter = at::zeros({2}).requires_grad_();
  torch::optim::SGD sgd({parameter}, 1.0);
  LossScaler scaler(8.0);
  const auto set_gradient = [&](float value) { parameter.mutable_grad() = at::full({2}, value); };
  set_gradient(16);
  EXPECT_TRUE(scaler.step(sgd));
  EXPECT_TRUE(parameter.eq(-2).all().item<bool>());
  EXPECT_THROW(scaler.step(sgd), InvalidArgument);
  EXPECT_THROW(scaler.unscale_(sgd), InvalidArgument);
  scaler.update();
  set_gradient(8);
  scaler.unscale_(sgd);  // e.g. for clipping
  EXPECT_TRUE(parameter.grad().eq(1).all().item<bool>());
  parameter.mutable_grad().mul_(0.5);
  EXPECT_TRUE(scaler.step(sgd));
  EXPECT_TRUE(parameter.eq(-2.5).all().item<bool>());
  scaler.update();
  set_gradient(kInf);
  EXPECT_FALSE(scaler.step(sgd));
  EXPECT_TRUE(parameter.eq(-2.5).all().item<bool>());
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4);
}

TEST(LossScaler, SavedAndLoaded_AnotherScaler_GoesOnAlikeOrIsRefused) {
  LossScaler scaler(options(64));
  update_with(scaler, kInf);
  update_with(scaler, 1);
  std::stringstream stream;
  torch::save(scaler, stream);
  LossScaler other;
  torch::load(other, stream);
  EXPECT_EQ(other.get_scale(), 32);
  EXPECT_EQ(other.growth_tracker(), 1);
  std::stringstream foreign;
  torch::save(at::ones({1}), foreign);
  EXPECT_THROW(torch::load(other, foreign), InvalidArgument);
  EXPECT_EQ(other.get_scale(), 32);
}

TEST(LossScaler, Limits_AtFloorAndCapAndAboveByHand_ScaleStaysUntilItChanges) {
  LossScalerOptions limited = options(8, /*interval=*/1);
  LossScaler scaler(limited.min_scale(4).max_scale(16));
  update_with(scaler, 1);
  update_with(scaler, 1);
  EXPECT_EQ(scaler.get_scale(), 16);
  for (int i = 0; i < 4; ++i) update_with(scaler, kInf);
  EXPECT_EQ(scaler.get_scale(), 4);
  LossScaler by_hand(limited.growth_interval(2));
  by_hand.set_scale(1024);
  update_with(by_hand, 1);
  EXPECT_EQ(by_hand.get_scale(), 1024);
  update_with(by_hand, 1);
  EXPECT_EQ(by_hand.get_scale(), 16);
}

TEST(LossScaler, Static_InfGradient_ScaleStaysAndNothingIsFound) {
  LossScalerOptions fixed = options(10);
  fixed.dynamic(false);
  LossScaler scaler(fixed);
  const at::Tensor grad = at::tensor({kInf, 20.f});
  scaler.unscale_({grad});
  EXPECT_FALSE(scaler.overflowed());
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 10);
  EXPECT_FLOAT_EQ(grad[1].item<float>(), 2);
}

TEST(LossScaler, FoundInf_SeveralUnscales_IsRememberedUntilCleared) {
  LossScaler scaler;
  scaler.unscale_({at::full({1}, kInf)});
  scaler.unscale_({at::ones({1})});
  const at::Tensor found = scaler.found_inf();
  scaler.clear_found_inf();
  EXPECT_FALSE(scaler.overflowed());
  EXPECT_EQ(found.item<float>(), 1) << "a returned flag is a copy";
}

TEST(LossScaler, State_SetAndRead_RoundTrips) {
  LossScaler scaler;
  const void* address = scaler.scale_tensor().data_ptr();
  scaler.set_scale(3.5);
  scaler.set_growth_tracker(7);
  update_with(scaler, 1);
  EXPECT_EQ(scaler.get_scale(), 3.5);
  EXPECT_EQ(scaler.growth_tracker(), 8);
  EXPECT_EQ(scaler.scale_tensor().data_ptr(), address) << "graphs capture the address";
  scaler.set_growth_tracker(0);
  EXPECT_EQ(scaler.growth_tracker(), 0);
}

TEST(LossScaler, State_CountOfALongerInterval_StillGrows) {
  LossScaler scaler(options(16, /*interval=*/3));
  scaler.set_growth_tracker(1000);
  update_with(scaler, 1);
  EXPECT_EQ(scaler.get_scale(), 32);
}

TEST(LossScaler, TensorsWithoutValues_Throw_AndTheScaleStays) {
  LossScaler scaler(options(64));
  const at::Tensor meta = at::empty({}, at::TensorOptions().device(at::kMeta));
  EXPECT_THROW(scaler.scale(at::Tensor()), InvalidArgument);
  EXPECT_THROW(scaler.scale(meta), InvalidArgument);
  EXPECT_THROW(scaler.unscale_({meta}), InvalidArgument);
  EXPECT_EQ(scaler.get_scale(), 64);
  EXPECT_EQ(scaler.scale(at::ones({})).item<float>(), 64);
}

TEST(LossScaler, Synchronize_OverflowOnOneRank_EveryRankBacksOff) {
  run_ranks(3, [](int rank, const Group& group) {
    LossScaler scaler(options(64));
    if (rank < 2) scaler.unscale_({at::full({4}, rank == 1 ? kInf : 1.f)});
    EXPECT_THROW(scaler.synchronize({}), InvalidArgument);
    scaler.synchronize(group);
    EXPECT_TRUE(scaler.overflowed());
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 32);
    scaler.unscale_({at::ones({4})});
    scaler.synchronize(group);
    EXPECT_FALSE(scaler.overflowed()) << "an old overflow came back";
  });
}

TEST(LossScaler, Options_OutOfRange_ThrowInvalidArgument) {
  const auto refused = [](void (*change)(LossScalerOptions&)) {
    LossScalerOptions bad;
    change(bad);
    EXPECT_THROW(LossScaler{bad}, InvalidArgument);
  };
  refused([](LossScalerOptions& o) { o.init_scale(0); });
  refused([](LossScalerOptions& o) { o.init_scale(kInf); });
  refused([](LossScalerOptions& o) { o.init_scale(1e39); });   // infinite in float32
  refused([](LossScalerOptions& o) { o.init_scale(1e-50); });  // zero in float32
  refused([](LossScalerOptions& o) { o.init_scale(8).max_scale(4); });
  refused([](LossScalerOptions& o) { o.growth_factor(1); });
  refused([](LossScalerOptions& o) { o.backoff_factor(1); });
  refused([](LossScalerOptions& o) { o.growth_interval(0); });
  refused([](LossScalerOptions& o) { o.min_scale(-1); });
  refused([](LossScalerOptions& o) { o.min_scale(2), o.max_scale(1); });
  LossScaler scaler;
  EXPECT_THROW(scaler.set_scale(kNan), InvalidArgument);
  EXPECT_THROW(scaler.set_growth_tracker(-1), InvalidArgument);
}

}  // namespace
}  // namespace apex::amp
