// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <stdexcept>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <apex/amp.h>
#include <apex/error.h>

namespace apex::amp {
namespace {

at::ScalarType matmul_dtype() {
  const at::Tensor x = at::ones({2, 2});
  return at::matmul(x, x).scalar_type();
}

TEST(AutocastGuard, Alive_MatmulIsLowPrecisionAndLossFloat32) {
  const at::Tensor x = at::ones({2, 2});
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    {
      AutocastGuard autocast(at::kCPU, dtype);
      const at::Tensor product = at::matmul(x, x);
      EXPECT_EQ(product.scalar_type(), dtype);
      EXPECT_EQ(at::mse_loss(product, product).scalar_type(), at::kFloat);
      EXPECT_EQ(at::relu(product).scalar_type(), dtype) << "follows its input";
    }
    EXPECT_EQ(matmul_dtype(), at::kFloat);
  }
}

TEST(AutocastGuard, Nested_EachEndRestoresWhatWasBefore) {
  {
    AutocastGuard outer(at::kCPU);  // the setting of the thread
    {
      AutocastGuard off(at::kCPU, std::nullopt, /*enabled=*/false);
      EXPECT_EQ(matmul_dtype(), at::kFloat);
      AutocastGuard inner(at::kCPU, at::kHalf);
      EXPECT_EQ(matmul_dtype(), at::kHalf);
    }
    EXPECT_EQ(matmul_dtype(), at::kBFloat16);
    AutocastGuard elsewhere(at::kCUDA, at::kHalf);
    EXPECT_EQ(matmul_dtype(), at::kBFloat16);
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCUDA));
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCUDA));
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kBFloat16);
  EXPECT_EQ(matmul_dtype(), at::kFloat);
}

TEST(AutocastGuard, Exception_LeavesTheScope_RestoresWhatWasBefore) {
  try {
    AutocastGuard outer(at::kCPU, at::kHalf);
    AutocastGuard inner(at::kCPU, at::kBFloat16, true, /*cache_enabled=*/false);
    throw std::runtime_error("in forward");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(matmul_dtype(), at::kFloat);
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kBFloat16);
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_EQ(at::autocast::increment_nesting(), 1) << "a guard was not counted down";
  at::autocast::decrement_nesting();
}

/// Whether a second use of `weight` reuses the cast of the first.
bool cast_is_remembered(const at::Tensor& weight) {
  const auto cast = [&] { return at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU); };
  return cast().is_same(cast());
}

TEST(AutocastGuard, Cache_OnUnlessToldOtherwise_EmptiedByTheOutermost) {
  const at::Tensor weight = at::ones({2, 2}).requires_grad_();
  at::Tensor first;
  {
    AutocastGuard outer(at::kCPU, at::kBFloat16);
    EXPECT_TRUE(cast_is_remembered(weight));
    first = at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU);
    {
      AutocastGuard inner(at::kCPU, at::kBFloat16);
    }
    EXPECT_TRUE(first.is_same(at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU)))
        << "only the outermost guard forgets";
    AutocastGuard without(at::kCPU, at::kBFloat16, true, /*cache_enabled=*/false);
    EXPECT_FALSE(cast_is_remembered(weight));
  }
  AutocastGuard next(at::kCPU, at::kBFloat16);
  EXPECT_FALSE(first.is_same(at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU)))
      << "an old cast would hide what an optimizer did to the parameter";
}

TEST(AutocastGuard, NestedWithAnotherDtype_CastsParametersAnew) {
  const at::Tensor weight = at::ones({2, 2}).requires_grad_();
  const at::Tensor x = at::ones({2, 2});
  AutocastGuard outer(at::kCPU, at::kBFloat16);
  EXPECT_EQ(at::matmul(x, weight).scalar_type(), at::kBFloat16);
  {
    AutocastGuard inner(at::kCPU, at::kHalf);
    EXPECT_EQ(at::matmul(x, weight).scalar_type(), at::kHalf);
  }
  EXPECT_EQ(at::matmul(x, weight).scalar_type(), at::kBFloat16);
}

TEST(AutocastGuard, BadArguments_ThrowAndChangeNothing) {
  EXPECT_THROW(AutocastGuard(at::kCPU, at::kFloat), InvalidArgument);
  EXPECT_THROW(AutocastGuard(at::kCPU, at::kDouble), InvalidArgument);
  EXPECT_THROW(AutocastGuard(at::kMeta, at::kHalf), InvalidArgument);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_EQ(matmul_dtype(), at::kFloat);
}

}  // namespace
}  // namespace apex::amp
